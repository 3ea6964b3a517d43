"""An asyncio event loop in virtual time: waiting costs nothing, and a deadlock is an error instead of a hang.

Whenever nothing is ready to run, the clock jumps to the next timer. Hours of simulated training take seconds, and a run is
a function of its seeds. Only for programs without real sockets and threads: `runtime.offload` runs inline under it.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from swarmavg.testing.processes import SimulatedProcess, Step, current_process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualDeadlockError(RuntimeError):
    """Every task waits for something that no timer will ever bring about."""


class _JumpingSelector(selectors.BaseSelector):
    """A selector that never waits: it moves the loop's clock on by as long as it was asked to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, descriptor, events, data)
        self._files[descriptor] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        descriptor = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._files.pop(descriptor)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlockError("virtual time stands still: no task can run and no timer is set")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files

    def close(self) -> None:
        self._files.clear()


class _NumberedTask(asyncio.Task[T]):
    """A task whose place in a set follows from when it was made and not from its address, so that runs repeat."""

    def __init__(self, number: int, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _SkewedTimer(asyncio.TimerHandle):
    """What a process with a skewed clock holds: the moment by its own clock. `real` is the timer that runs."""

    def __init__(self, when: float, step: Step, loop: asyncio.AbstractEventLoop, real: asyncio.TimerHandle) -> None:
        super().__init__(when, step, (), loop)
        self._real = real

    def cancel(self) -> None:
        super().cancel()
        self._real.cancel()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop. `time()` starts at 0 and counts virtual seconds; in a process with a skewed clock it shows that."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._task_numbers = itertools.count(1)
        self._processes: list[SimulatedProcess] = []
        super().__init__(self._jumping)

    @property
    def is_virtual(self) -> bool:
        """Asked by `runtime.offload`, which must not use threads here."""
        return True

    def time(self) -> float:
        return self._time_in(current_process())

    def _time_in(self, process: SimulatedProcess | None) -> float:
        return self._jumping.now if process is None else self._jumping.now + process.clock_offset

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        process = current_process(context)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        step = process.step(callback, args, context)
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._time_in(current_process(context)) + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = current_process(context)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        step = process.step(callback, args, context, timed=True)
        timer = super().call_at(when - process.clock_offset, step, context=step.context)
        step.handle = timer
        return timer if not process.clock_offset else _SkewedTimer(when, step, self, timer)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        process = current_process(context)
        number = next(self._task_numbers)
        task: _NumberedTask[T] = _NumberedTask(number, coro, loop=self, name=name, context=context, **options)
        if process is not None:
            process.adopt(task)
        return task

    # --- processes

    def add_process(self, process: SimulatedProcess) -> None:
        self._processes.append(process)

    def end_processes(self) -> None:
        """Let frozen processes run again, and clear away what killed ones have left: none of it will ever run."""
        for process in self._processes:
            process.thaw()
            process.bury()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, debug: bool = False) -> T:
    """Run ``main()`` to its end in a fresh virtual loop and return its result.

    Raises `VirtualDeadlockError` when nothing can ever happen again, and `AssertionError` when `main` returns while tasks
    that it started are still alive: a leak in the code under test. Tasks of killed processes do not count.
    """
    with asyncio.Runner(loop_factory=VirtualLoop, debug=debug) as runner:
        try:
            return runner.run(_checked(main))
        except VirtualDeadlockError:  # it came from the loop, and `main` knows nothing of it yet
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            loop.end_processes()
            raise


async def _checked(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    try:
        result = await main()
    finally:
        loop.end_processes()
    for _ in range(3):  # let cancelled tasks and callbacks of the last moment unwind
        await asyncio.sleep(0)
    loop.end_processes()  # clearing away may have left something in its turn
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    if leaked:
        raise AssertionError(f"{len(leaked)} tasks leaked: {sorted(task.get_name() for task in leaked)}\n{leaked}")
    return result
