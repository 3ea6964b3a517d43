"""What a channel has received and nobody has taken yet, and the one task that waits for more.

Decides for each arriving message where its payload goes: into memory of the receiver's choice when somebody waits, into
fresh memory while little is buffered, nowhere (the sender is held back) otherwise. Does no I/O.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from swarmavg.errors import LocalProtocolError
from swarmavg.transport.interface import END, Allocate, End, Message

NOTHING: Final = memoryview(bytearray())
MESSAGE_OVERHEAD: Final = 256
"""What a queued message costs beside its bytes: empty messages fill the inbox too."""


class Inbox:
    """The receiving half of a channel.

    `wanted` is called when there is a new use for bytes: a task began to wait, or room was made. `broken` is called when
    the stream cannot be read on: `allocate` failed, or a `receive` was cancelled half-way through a message.
    """

    def __init__(self, *, limit: int, wanted: Callable[[], None], broken: Callable[[str], None]) -> None:
        self._limit = limit
        self._wanted = wanted
        self._broken = broken
        self._queue: deque[Message] = deque()
        self._buffered = 0
        self._ending: End | Exception | None = None
        self._waiter: asyncio.Future[Message | End] | None = None
        self._allocate: Allocate | None = None
        self._lent = False  # the waiter's memory is being filled

    async def receive(self, allocate: Allocate | None) -> Message | End:
        """See `Channel.receive`."""
        if self._waiter is not None:
            raise LocalProtocolError("two tasks receive from one channel at once")
        if self._queue:
            return self._from_queue(allocate)
        if self._ending is not None:
            return self._end_or_raise(self._ending)
        self._allocate = allocate
        waiter: asyncio.Future[Message | End] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        try:
            self._wanted()
            taken = await waiter
        except asyncio.CancelledError:
            self._cancelled(waiter)
            raise
        finally:
            self._waiter = self._allocate = None
            self._lent = False
        return taken

    def place(self, header: bytes, payload_bytes: int) -> memoryview | None:
        """Memory for the payload of the message that now begins, or `None`: hold the sender back and ask again later."""
        if self._waiting and not self._queue:
            return self._lend(header, payload_bytes)
        cost = len(header) + payload_bytes + MESSAGE_OVERHEAD
        if self._buffered + cost > self._limit:
            return None
        return memoryview(bytearray(payload_bytes)) if payload_bytes else NOTHING

    def put(self, header: bytes, payload: memoryview) -> None:
        """The message for which `place` gave memory is complete."""
        message = Message(header, payload)
        if not self._waiting:
            self._buffered += _cost(message)
            self._queue.append(message)
        elif self._lent or not payload:
            self._resolve(message)
        else:  # placed before anybody waited
            target = self._lend(header, payload.nbytes)
            if target is not None:
                target[:] = payload
                self._resolve(Message(header, target))

    def finish(self, ending: End | Exception) -> None:
        """Nothing follows what is already here but `ending`. The first ending stays, but an error overrides nothing else."""
        if self._ending is None:
            self._ending = ending
        if self._waiting and not self._queue:
            self._end_waiter(self._ending)

    def close(self, error: Exception) -> None:
        """Drop everything: from now on `receive` raises `error`."""
        self._queue.clear()
        self._buffered = 0
        self._ending = error
        if self._waiting:
            self._end_waiter(error)

    @property
    def _waiting(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _from_queue(self, allocate: Allocate | None) -> Message:
        message = self._queue.popleft()
        self._buffered -= _cost(message)
        if allocate is not None and message.payload:
            try:
                target = _allocated(allocate, message.header, message.payload.nbytes)
            except Exception as error:
                self._break(error)
                raise
            target[:] = message.payload
            message = Message(message.header, target)
        self._wanted()
        return message

    def _lend(self, header: bytes, payload_bytes: int) -> memoryview | None:
        if not payload_bytes:
            return NOTHING
        if self._allocate is None:
            target = memoryview(bytearray(payload_bytes))
        else:
            try:
                target = _allocated(self._allocate, header, payload_bytes)
            except Exception as error:  # noqa: BLE001  (the caller's code: its error comes out of the caller's `receive`)
                self._break(error)
                return None
        self._lent = True
        return target

    def _break(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._broken(f"the receiver refused a payload: {type(error).__name__}: {error}")

    def _cancelled(self, waiter: asyncio.Future[Message | End]) -> None:
        """Keep the channel usable if no byte has been put into the receiver's memory."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            message = waiter.result()
            if isinstance(message, Message) and not message.payload:
                self._queue.appendleft(message)
                self._buffered += _cost(message)
                return
            if message is END:
                return
        elif not self._lent:
            return
        self._broken("a receive was cancelled half-way through a message")

    def _resolve(self, message: Message) -> None:
        if self._waiter is not None:
            self._waiter.set_result(message)

    def _end_waiter(self, ending: End | Exception) -> None:
        if self._waiter is None:
            return
        if isinstance(ending, End):
            self._waiter.set_result(ending)
        else:
            self._waiter.set_exception(ending)

    def _end_or_raise(self, ending: End | Exception) -> End:
        if isinstance(ending, End):
            return ending
        raise again(ending)


def _allocated(allocate: Allocate, header: bytes, payload_bytes: int) -> memoryview:
    target = allocate(header, payload_bytes)
    if not isinstance(target, memoryview):
        raise TypeError(f"allocate must return a memoryview, got {type(target).__name__}")
    if target.readonly or not target.c_contiguous or target.nbytes != payload_bytes:
        raise ValueError(
            f"allocate must return writable contiguous memory of {payload_bytes} bytes, got {target.nbytes} bytes"
            f"{' (read-only)' if target.readonly else ''}{'' if target.c_contiguous else ' (not contiguous)'}"
        )
    return target.cast("B")


def again(error: Exception) -> Exception:
    """The same error without the traceback and context of the last time that it was raised."""
    error.__traceback__ = None
    error.__context__ = None
    return error


def _cost(message: Message) -> int:
    return len(message.header) + message.payload.nbytes + MESSAGE_OVERHEAD
