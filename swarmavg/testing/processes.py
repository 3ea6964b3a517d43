"""A peer's process, simulated: code that can be frozen, killed or given a wrong clock as the operating system would do it.

Whatever is started inside a process belongs to it, by a context variable that tasks and callbacks inherit. Under
`swarmavg.testing.clock.run_virtual`, the event loop asks the process before it runs any of that.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple
from unittest.mock import patch
from weakref import WeakSet

from swarmavg.transport.memory_link import Host

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_UNWINDING: Final = 1000
_FIRST_MOMENT: Final = 1.7e9
"""What wall clocks show at the start of virtual time: some day in 2023."""

_current: ContextVar[SimulatedProcess | None] = ContextVar("swarmavg_simulated_process", default=None)


def current_process(context: Context | None = None) -> SimulatedProcess | None:
    """The process in which the caller runs, or to which `context` belongs."""
    return _current.get() if context is None else context.get(_current)


class ProcessKilledError(Exception):
    """What was to run in a process will not end: the process was killed."""


class ProcessState(enum.Enum):
    """As the operating system sees it."""

    RUNNING = "running"
    FROZEN = "frozen"
    KILLED = "killed"


class Step:
    """One callback of a process, which the event loop runs through it."""

    __slots__ = ("_args", "_callback", "_process", "context", "handle", "timed")

    def __init__(
        self, process: SimulatedProcess, callback: Callable[..., object], args: tuple[Any, ...], context: Context, timed: bool
    ) -> None:
        self._process = process
        self._callback = callback
        self._args = args
        self.context = context
        self.timed = timed
        """Whether a timer runs it."""
        self.handle: asyncio.Handle | None = None
        """What its owner may cancel."""

    def __call__(self) -> None:
        if self._process.admits(self) and not (self.handle is not None and self.handle.cancelled()):
            self._callback(*self._args)

    def __repr__(self) -> str:
        return f"<{self._callback!r} in {self._process}>"


class SimulatedProcess(Host):
    """See the module. In an event loop that is not virtual, it can do neither of these.

    What a process does between two awaits is not divided: killed or frozen in the midst of it, it runs on to the next await,
    with its network gone if it was killed.

    Arguments:
        name: for messages.
        clock_offset: seconds by which its event loop's clock is ahead of the others'.
    """

    def __init__(self, name: str, *, clock_offset: float = 0.0) -> None:
        self.name = name
        self.clock_offset = clock_offset
        self.wall_offset = clock_offset
        """Seconds by which its wall clock is ahead; see `wall_clocks`."""
        self.state = ProcessState.RUNNING
        self._loop = loop = asyncio.get_running_loop()
        self._death: asyncio.Future[None] = loop.create_future()
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._corpses: list[asyncio.Task[Any]] = []
        self._soon: deque[Step] = deque()
        self._arrived: deque[Step] = deque()
        self._due: deque[Step] = deque()
        register = getattr(loop, "add_process", None)
        self._virtual = register is not None
        if register is not None:
            register(self)
        elif clock_offset:
            self._check_virtual()

    @property
    def alive(self) -> bool:
        """Whether it has not been killed; a frozen one is alive."""
        return self.state is not ProcessState.KILLED

    def wall_time(self) -> float:
        """Its wall clock, in seconds since 1970: the same in every run, so that runs repeat."""
        return _FIRST_MOMENT + Context().run(self._loop.time) + self.wall_offset

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What the block starts belongs to this process."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def finish(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> T:
        """Run `work` inside the process, as a task of its own, and return its result.

        Raises `ProcessKilledError` as soon as the process is killed. A cancellation is passed on to the work.
        """
        if not self.alive:
            work.close()
            raise ProcessKilledError(f"{self} was killed before")
        task = self.start(work, name=name)
        ends: list[asyncio.Future[Any]] = [task, self._death]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            raise
        if not self.alive:
            raise ProcessKilledError(f"{self} was killed")
        return task.result()

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """A task inside the process. It never ends if the process is killed: to wait for it, use `finish`."""
        with self.inside():
            return self._loop.create_task(work, name=name)

    # --- what befalls it

    def kill(self) -> None:
        """As ``kill -9``: nothing of it ever runs again."""
        self._check_virtual()
        if not self.alive:
            return
        self.state = ProcessState.KILLED
        self._corpses = list(self._tasks)
        for parked in (self._soon, self._arrived, self._due):
            parked.clear()
        self._death.set_result(None)

    def freeze(self) -> None:
        """As SIGSTOP: nothing of it runs until `thaw`. What is sent to it waits, and its clocks go on."""
        self._check_virtual()
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.FROZEN

    def thaw(self) -> None:
        """As SIGCONT. First runs what was ready, then what has arrived, then the timers that are due: an event loop's order."""
        if self.state is not ProcessState.FROZEN:
            return
        self.state = ProcessState.RUNNING
        for parked in (self._soon, self._arrived, self._due):
            for step in parked:
                self._loop.call_soon(step, context=step.context)
            parked.clear()

    def bury(self) -> None:
        """Clear away the tasks of a killed process without a word. Only at the end of a simulation: their `finally` run."""
        if self.alive or not self._corpses:
            return
        muted = logging.root.manager.disable
        logging.disable()  # the dead say nothing
        try:
            with self.inside():
                while self._corpses:
                    _dismantle(self._corpses.pop())
        finally:
            logging.disable(muted)

    # --- for the event loop

    def step(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, *, timed: bool = False
    ) -> Step:
        return Step(self, callback, args, copy_context() if context is None else context, timed)

    def admits(self, step: Step) -> bool:
        """Whether it may run now. If the process is frozen, it will later."""
        if self.state is ProcessState.FROZEN:
            (self._due if step.timed else self._soon).append(step)
        return self.state is ProcessState.RUNNING

    def adopt(self, task: asyncio.Task[Any]) -> None:
        if self.alive:
            self._tasks.add(task)
        else:
            self._corpses.append(task)

    # --- for the network

    def run(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        if self.state is ProcessState.RUNNING:
            with self.inside():
                callback(*args)
        elif self.state is ProcessState.FROZEN:
            with self.inside():
                self._arrived.append(self.step(callback, args, None))

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        with self.inside():
            self._loop.call_soon(callback, *args)

    def _check_virtual(self) -> None:
        if not self._virtual:
            raise RuntimeError(f"{self} needs virtual time: use swarmavg.testing.clock.run_virtual")

    def __repr__(self) -> str:
        return f"<process {self.name}, {self.state.value}>"


def _dismantle(task: asyncio.Task[Any]) -> None:
    """Free a task that will never run again, so that neither it nor what it waited for complains."""
    waited_for = getattr(task, "_fut_waiter", None)
    for future in (task, waited_for):
        if future is not None and future.done() and not future.cancelled():
            future.exception()  # seen by nobody, but not forgotten either
    if task.done():
        return
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001  (as asyncio itself does where it gives tasks up)
    asyncio.tasks._unregister_task(task)  # noqa: SLF001  (documented for extensions of asyncio)
    _unwind(task.get_coro())


def _unwind(coroutine: Any) -> None:
    """Close it from the inside out, together with coroutines that it holds and that were never begun."""
    for _ in range(_MOST_UNWINDING):
        innermost = _innermost(coroutine)
        frame = getattr(innermost, "cr_frame", None)
        unbegun = [] if frame is None else [value for value in frame.f_locals.values() if _is_unbegun(value)]
        with suppress(Exception, asyncio.CancelledError):  # what a dead process complains of is nobody's concern
            innermost.close()  # which a `finally` that awaits survives, once
        for other in unbegun:
            if _is_unbegun(other):
                _unwind(other)
        if getattr(coroutine, "cr_frame", None) is None:
            return


def _is_unbegun(value: object) -> bool:
    return inspect.iscoroutine(value) and inspect.getcoroutinestate(value) == inspect.CORO_CREATED


def _innermost(coroutine: Any) -> Any:
    """The coroutine at the end of the chain of those that await each other, closed ones left out."""
    while getattr(awaited := getattr(coroutine, "cr_await", None), "cr_frame", None) is not None:
        coroutine = awaited
    return coroutine


@contextmanager
def wall_clocks() -> Iterator[None]:
    """Within the block, `time.time()` and `time.time_ns()` inside a process show the wall clock of that process."""
    real, real_ns = time.time, time.time_ns

    def wall_time() -> float:
        process = current_process()
        return real() if process is None else process.wall_time()

    def wall_time_ns() -> int:
        process = current_process()
        return real_ns() if process is None else round(process.wall_time() * 1e9)

    with patch.multiple(time, time=wall_time, time_ns=wall_time_ns):
        yield
