"""An async context manager held open from a plain thread, while the loop lives on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, TypeVar

from swarmavg.errors import BlockingCallError, ClosedError
from swarmavg.sync.worker import Worker

T = TypeVar("T")


@contextmanager
def held(worker: Worker, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enter `manager` in the loop, give its value to the block, and leave it when the block ends, however it ends.

    For locks: the manager is not told what the block raised. It is left by the loop itself when the worker ends before.
    """
    holder = _Holder(manager)
    try:
        yield worker.run(holder.enter)
    finally:
        _let_go(worker, holder)


def _let_go(worker: Worker, holder: _Holder[Any]) -> None:
    if worker.pid != os.getpid():
        return  # a forked child holds nothing
    with contextlib.suppress(ClosedError, BlockingCallError):  # the latter where the garbage collector ends the block
        worker.schedule(holder.release)  # happens though the wait for it be refused, or interrupted
        worker.run(holder.leave)


class _Holder(Generic[T]):
    """One task that enters and leaves, as managers may require."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._task: asyncio.Task[None] | None = None
        self._entered: asyncio.Future[T] | None = None
        self._release = asyncio.Event()

    async def enter(self) -> T:
        self._entered = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(self._entered), name="swarmavg.sync hold")
        waited: list[asyncio.Future[Any]] = [self._task, self._entered]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._entered.done():
            task, self._task = self._task, None
            await task  # raises what entering raised
        return self._entered.result()

    def release(self) -> None:
        """Let the task leave, as soon as it has entered."""
        self._release.set()

    async def leave(self) -> None:
        """After `release`: wait until the task has left. Raises what leaving raised."""
        if self._task is None or self._entered is None:
            return
        if not self._entered.done():  # interrupted while it waited to enter
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _hold(self, entered: asyncio.Future[T]) -> None:
        async with self._manager as value:
            entered.set_result(value)
            await self._release.wait()
