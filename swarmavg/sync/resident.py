"""What the blocking classes share: each drives one object of the async API that lives in the worker thread.

Subclasses spell out their methods with the arguments of the async class; `mirrors` lends them its docstrings.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from swarmavg.errors import ClosedError, ForkedError
from swarmavg.sync.tenancy import Tenant, acquire, release, withdraw
from swarmavg.sync.worker import Worker, refuse_running_loop

T = TypeVar("T")
Class = TypeVar("Class", bound=type)


class Core(Protocol):
    """An object of the async API."""

    async def start(self) -> object: ...

    async def aclose(self) -> None: ...


CoreT = TypeVar("CoreT", bound=Core)


class Resident(Generic[CoreT]):
    """An object of the async API behind blocking methods. Safe to use from several threads at once."""

    def __init__(self, core: CoreT, *, leaves_last: bool = False) -> None:
        self._core = core
        self._tenant = Tenant(self._depart, leaves_last)
        self._worker: Worker | None = None
        self._started = False
        self._closed = False
        self._lifecycle = threading.RLock()

    def start(self) -> Self:
        """Begin to take part. Returns at once if it runs already."""
        worker = self._move_in()
        if worker is None:
            return self
        try:
            worker.run(self._start)
        except BaseException:
            if not self._started:  # an interrupt can come when all is done; the object then waits for its `close`
                self._abandon_start(worker)
            raise
        return self

    async def _start(self) -> None:
        await self._core.start()
        self._started = True

    def close(self) -> None:
        """Tell others, and leave: bounded, whatever they do. A second call does nothing, nor does one in a forked child."""
        worker = self._move_out()
        if worker is not None:
            self._leave(worker, self._core.aclose)

    def _leave(self, worker: Worker, leave: Callable[[], Awaitable[object]]) -> None:
        """After `_move_out`: have the core leave the swarm in this way, and leave the worker."""
        try:
            worker.run(leave)
        finally:
            release(worker, self._tenant)

    async def _depart(self) -> None:
        """Close, at the end of the interpreter; runs in the worker's loop."""
        self._closed = True
        await self._core.aclose()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            if self._started:  # interrupted when all was done, and nobody else will close it
                self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _move_in(self) -> Worker | None:
        """The worker to be started in, or None if this has been done."""
        with self._lifecycle:
            if self._worker is None and not self._closed:
                try:
                    self._worker = acquire(self._tenant)
                except BaseException:  # an interrupt, in whichever of these lines
                    self._worker = None
                    withdraw(self._tenant)
                    raise
                return self._worker
        self._home()
        return None

    def _move_out(self) -> Worker | None:
        """The worker to be left, or None where there is nothing to close: never started, closed, or another process's."""
        with self._lifecycle:
            if self._closed or self._worker is None or self._worker.pid != os.getpid():
                self._closed = True
                return None
            self._worker.check_caller()
            self._closed = True
            return self._worker

    def _abandon_start(self, worker: Worker) -> None:
        """The core has cleaned up after itself; it may be started again."""
        with self._lifecycle:
            self._worker = None
        release(worker, self._tenant)

    def _peek(self, function: Callable[[], T]) -> T:
        """Call a plain function of the core where its data are consistent: in the loop, as soon as there is one."""
        return function() if self._worker is None else self._worker.peek(function)

    def _home(self) -> Worker:
        """The worker. Raises `ClosedError` before the start and after the close, and `ForkedError` in a forked child."""
        refuse_running_loop()
        if self._closed:
            raise ClosedError(f"this {self._kind} is closed")
        if self._worker is None:
            raise ClosedError(f"this {self._kind} has not been started: use `with {self._kind}(...)`, or call start()")
        if self._worker.pid != os.getpid():
            raise ForkedError(
                f"this {self._kind} belongs to process {self._worker.pid}, and this is a fork of it ({os.getpid()}): "
                "make a new one after the fork"
            )
        return self._worker

    @property
    def _kind(self) -> str:
        return type(self).__name__


def mirrors(original: type) -> Callable[[Class], Class]:
    """Class decorator: members without a docstring of their own get that of the member of the same name of `original`."""

    def lend(mirror: Class) -> Class:
        mirror.__doc__ = mirror.__doc__ or original.__doc__
        for name, member in vars(mirror).items():
            source = getattr(original, ASYNC_NAMES.get(name, name), None)
            if not name.startswith("_") and getattr(member, "__doc__", None) is None and source is not None:
                member.__doc__ = source.__doc__
        return mirror

    return lend


ASYNC_NAMES = {"close": "aclose"}
"""Methods whose blocking twin goes by another name."""
