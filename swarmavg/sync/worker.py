"""The thread in which the event loop behind `swarmavg.sync` runs, and the one way into it.

Every blocking call goes through `Worker.run`, which holds the rules of the facade: where it may be called, and what Ctrl-C
does to it. Who lives in the worker, and for how long, is the business of `tenancy`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
from anyio.from_thread import BlockingPortal

from swarmavg.errors import BlockingCallError, ClosedError, ForkedError
from swarmavg.sync.call import POLL_SECONDS, Call, Signal
from swarmavg.sync.inheritance import RememberingSelector, let_go
from swarmavg.telemetry.logs import get_logger

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNWIND_SECONDS = 5.0
"""How long an interrupted call may take to tell its group mates before the interrupt is let through regardless."""

_log = get_logger(__name__)


class Worker:
    """An event loop in a daemon thread. Made by `tenancy.acquire` only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._calls: set[Call[Any]] = set()
        self._selector: RememberingSelector | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._takes_calls = True
        entrance = _Entrance()
        self._thread = threading.Thread(target=_main, args=(entrance, self._loop_options()), name="swarmavg-sync", daemon=True)
        try:
            self._thread.start()
            self._loop, self._portal = entrance.wait()
        except BaseException:  # such as Ctrl-C: nobody will ever have this worker
            entrance.turn_away()
            raise

    def _loop_options(self) -> dict[str, Any]:
        if sys.platform == "win32":
            return {}
        self._selector = RememberingSelector()
        return {"loop_factory": functools.partial(asyncio.SelectorEventLoop, self._selector)}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def schedule(self, callback: Callable[[], object]) -> None:
        """Run the callback in the loop soon, in the context of the caller. Raises `ClosedError` when the loop has ended, or is
        about to.
        """
        with contextlib.suppress(RuntimeError):  # of a closed loop
            if self._takes_calls:
                self._loop.call_soon_threadsafe(callback)
                return
        raise ClosedError("the worker thread of swarmavg.sync has ended")

    def submit(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> Call[T]:
        """Begin ``await function(*args)`` in the loop and return at once."""
        call = self._new_call(function, *args)
        call.start()
        return call

    def submit_future(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> concurrent.futures.Future[T]:
        """`submit`, for the user's own waiting and cancelling."""
        call = self._new_call(function, *args)
        future = call.as_future()
        call.start()
        return future

    def run(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> T:
        """``await function(*args)`` in the loop, and wait for it.

        Whatever interrupts the wait, such as Ctrl-C, is raised when the coroutine has been cancelled and has unwound, or has
        not done so within `UNWIND_SECONDS`.
        """
        call = self._new_call(function, *args)
        try:
            call.start()
            call.wait()
        except BaseException:
            self.give_up(call)
            raise
        try:
            return call.result()
        finally:
            del call  # see `Call.result`

    def peek(self, function: Callable[[], T]) -> T:
        """Call a plain function in the loop, where it sees consistent data; directly once the loop has ended."""

        async def look() -> T:
            return function()

        if self.alive:
            with contextlib.suppress(ClosedError):
                return self.run(look)
        return function()

    def give_up(self, call: Call[Any]) -> None:
        """Cancel the call and wait, bounded, until it has unwound."""
        call.cancel()
        if not call.wait(UNWIND_SECONDS):
            _log.warning("a cancelled call has not ended", seconds=UNWIND_SECONDS, call=call.name)

    def _new_call(self, function: Callable[[Unpack[Ts]], Awaitable[T]], *args: *Ts) -> Call[T]:
        self.check_caller()
        call = Call(self, functools.partial(function, *args), getattr(function, "__qualname__", repr(function)))
        self._calls.add(call)
        return call

    def forget(self, call: Call[Any]) -> None:
        """A call of this worker has ended."""
        self._calls.discard(call)

    def check_caller(self) -> None:
        """Raises `ForkedError` or `BlockingCallError` where a call cannot be waited for."""
        if self.pid != os.getpid():
            raise ForkedError(f"started in process {self.pid}, used in its fork {os.getpid()}: make a new Peer after the fork")
        if threading.get_ident() == self._thread.ident:
            raise BlockingCallError("a blocking call in swarmavg.sync's own worker thread would wait for itself")
        refuse_running_loop()

    def stop(self, timeout: float) -> None:
        """Cancel what still runs and end the thread; past `timeout` seconds leave it to the end of the process."""
        with contextlib.suppress(ClosedError):
            self.schedule(functools.partial(self._begin_stop, timeout / 2))
        self._thread.join(timeout)
        if self._thread.is_alive():
            _log.warning("the worker thread has not ended: a task ignores its cancellation", seconds=timeout)
        else:
            self._forget_calls()

    def _begin_stop(self, grace: float) -> None:
        self._stopping = self._loop.create_task(self._wind_down(grace), name="swarmavg.sync wind down")

    async def _wind_down(self, grace: float) -> None:
        self._takes_calls = False
        await asyncio.sleep(0)  # whatever other threads have scheduled before begins, and is then ended with the rest
        calls = list(self._calls)
        for call in calls:
            call.close()
        tasks = [call.task for call in calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        await self._portal.stop(cancel_remaining=True)

    def _forget_calls(self) -> None:
        for call in list(self._calls):
            call.lost()

    def abandon_in_child(self) -> None:
        """In a forked child, where the thread does not exist: drop its sockets without a word."""
        if self._selector is not None:
            let_go(self._selector)


def refuse_running_loop() -> None:
    """Raises `BlockingCallError` in a thread whose event loop would stand still while the call waits."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCallError(
        "swarmavg.sync was called from inside a running event loop, which would stand still meanwhile: "
        "use await with swarmavg.Peer, swarmavg.Averager and swarmavg.TrainingStateAverager there"
    )


class _Entrance:
    """How a new thread and the one that started it meet, though the latter may be interrupted at any moment."""

    def __init__(self) -> None:
        self._arrived = Signal()
        self._inside: tuple[asyncio.AbstractEventLoop, BlockingPortal] | None = None
        self._error: BaseException | None = None
        self._unwanted = False

    def wait(self) -> tuple[asyncio.AbstractEventLoop, BlockingPortal]:
        while not self._arrived.wait(POLL_SECONDS):
            pass
        if self._inside is None:
            raise self._error or ClosedError("the worker thread of swarmavg.sync has ended")
        return self._inside

    def turn_away(self) -> None:
        self._unwanted = True
        if self._inside is not None:
            loop, portal = self._inside
            with contextlib.suppress(RuntimeError):  # it has ended already
                asyncio.run_coroutine_threadsafe(portal.stop(), loop)

    def enter(self, portal: BlockingPortal) -> bool:
        """In the new thread's loop: whether to stay."""
        self._inside = asyncio.get_running_loop(), portal
        self._arrived.set()
        return not self._unwanted

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._arrived.set()


def _main(entrance: _Entrance, options: dict[str, Any]) -> None:
    """The thread's life. The portal is not entered from outside, by `anyio.from_thread.start_blocking_portal`, since that waits
    for the thread for ever, even in a forked child, where the thread is missing.
    """

    async def serve() -> None:
        async with BlockingPortal() as portal:
            if entrance.enter(portal):
                await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend="asyncio", backend_options=options)
    except BaseException as error:  # noqa: BLE001  (the end of the thread: its callers notice, see `Call.wait`)
        entrance.fail(error)
        _log.debug("the worker thread ended", error=error)
