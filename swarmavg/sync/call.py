"""One coroutine that runs in the worker thread, and the means to wait for it, or to give it up, from another thread.

The coroutine runs in a plain asyncio task, not in an anyio cancel scope: a scope repeats the cancellation at every `await`
until the task ends, and so would cut off the clean-up in which group mates are told.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from swarmavg.errors import ClosedError

T = TypeVar("T")

POLL_SECONDS = 0.2
"""How long one wait on a lock lasts: on Windows it cannot be interrupted, and a dead worker must be noticed anywhere."""


class Signal:
    """Set once, waited for by any thread.

    In place of `threading.Event`, whose inner lock stays locked when an interrupt strikes the waiting thread at the wrong
    moment: here that moment does not exist, since the wait is one call into C.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._news.put(None)

    def wait(self, timeout: float) -> bool:
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=timeout)
                self._news.put(None)  # for others who wait; one who misses it notices after its own time-out
        return self._is_set


class Host(Protocol):
    """The side of the worker thread that a call needs."""

    @property
    def alive(self) -> bool: ...

    def schedule(self, callback: Callable[[], object]) -> None:
        """Run the callback in the loop soon. Raises `ClosedError` when the loop has ended."""

    def forget(self, call: Call[Any]) -> None:
        """The call has ended."""


class Call(Generic[T]):
    """``await function()`` in the worker thread.

    Holds no reference to itself: what a finished call returned is freed with the last reference to it.
    """

    def __init__(self, host: Host, function: Callable[[], Awaitable[T]], name: str) -> None:
        self.name = name
        self.task: asyncio.Task[T] | None = None
        self._host = host
        self._function = function
        self._given_up = False
        self._stopper: KeyboardInterrupt | SystemExit | ClosedError | None = None
        self._error: BaseException | None = None
        self._unwound = Signal()
        self._future: concurrent.futures.Future[T] | None = None

    def start(self) -> None:
        """Raises `ClosedError` when the worker has ended."""
        try:
            self._host.schedule(self._begin)
        except ClosedError:
            self.lost()
            raise

    def cancel(self) -> None:
        """Ask the coroutine to unwind; from any thread, also before it has begun. Does nothing after its end."""
        self._given_up = True
        try:
            self._host.schedule(self._cancel_task)
        except ClosedError:
            self.lost()

    def close(self) -> None:
        """In the loop, which is about to end: cancel the coroutine. The waiting thread gets a `ClosedError`."""
        self._given_up = True
        self._stopper = self._stopper or ClosedError(f"closed during {self.name}")
        self._cancel_task()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the coroutine has unwound; False if that takes more than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._unwound.wait(_slice(deadline)):
            if not self._host.alive and not self._unwound.is_set():
                self.lost()
            elif deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def done(self) -> bool:
        """Whether the coroutine has unwound."""
        return self._unwound.is_set()

    def result(self) -> T:
        """Once it is done: its result, or what it raised, lone errors unwrapped from their exception groups."""
        try:
            if self._error is not None:
                raise self._error
            assert self.task is not None, "a call is done when its task has ended"
            return self.task.result()
        finally:
            del self  # the traceback of the error would hold the call, which holds the error

    def as_future(self) -> concurrent.futures.Future[T]:
        """A future of the outcome, to be asked for before the start. Cancelling it cancels the coroutine."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.add_done_callback(lambda ended: self.cancel() if ended.cancelled() else None)
        self._future = future
        return future

    def lost(self) -> None:
        """The loop has ended, and every task with it: nobody else will settle this call."""
        if not self._unwound.is_set():
            self._end(ClosedError(f"the worker thread ended before {self.name} did"))

    def _begin(self) -> None:
        if self._unwound.is_set():
            return
        self.task = asyncio.get_running_loop().create_task(self._run(), name=self.name)
        self.task.add_done_callback(self._settle)
        if self._given_up:
            self.task.cancel()

    def _cancel_task(self) -> None:
        if self.task is not None:
            self.task.cancel()
        elif not self._unwound.is_set():  # what the thread had in mind to begin, when it was interrupted
            self._end(self._stopper or concurrent.futures.CancelledError())

    async def _run(self) -> T:
        try:
            return await self._function()
        except (KeyboardInterrupt, SystemExit) as error:
            self._stopper = error  # would end the loop of everybody if raised here; it belongs to the waiting thread
            raise asyncio.CancelledError from error

    def _settle(self, task: asyncio.Task[T]) -> None:
        error = (self._stopper or concurrent.futures.CancelledError()) if task.cancelled() else task.exception()
        self._end(None if error is None else unwrap(error))

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._unwound.set()
        self._host.forget(self)
        if self._future is not None:
            self._pass_on(self._future)

    def _pass_on(self, future: concurrent.futures.Future[T]) -> None:
        if isinstance(self._error, concurrent.futures.CancelledError):
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self.result())


def _slice(deadline: float | None) -> float:
    return POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(deadline - time.monotonic(), 0.0))


def unwrap(error: BaseException) -> BaseException:
    """The error that a group holds, where it holds just one; what caused the group is kept as its cause."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        lone: BaseException = error.exceptions[0]
        if lone.__cause__ is None and error.__cause__ is not None:
            lone.__cause__ = error.__cause__
        error = lone
    return error
