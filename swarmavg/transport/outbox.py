"""The sending half of a connection: writes frames to the wire and waits until the caller's memory is free again."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from swarmavg.errors import ChannelError, ChannelLostError
from swarmavg.transport.framing import Kind, encode

_JOINED_BYTES: Final = 16 * 1024
"""Payloads up to this size are copied behind their header: one write instead of several."""
_PIECE_BYTES: Final = 512 * 1024
"""What the wire cannot send at once it may copy: no more than this."""
_TURN_BYTES: Final = 1024 * 1024
"""A sender that never has to wait lets others run after so many bytes."""
_WRITE_COST: Final = 8 * 1024
"""What a write costs beside its bytes, in bytes."""


class Outbox:
    """One sender at a time. The wire must pause writing whenever it holds any byte: see `attach`."""

    def __init__(self) -> None:
        self._wire: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._error: ChannelError | None = None
        self._unyielded = 0
        self._inside_message = False

    @property
    def inside_message(self) -> bool:
        """Whether the stream cannot take another frame now, because one is half out."""
        return self._inside_message

    def attach(self, wire: asyncio.Transport) -> None:
        wire.set_write_buffer_limits(high=0)
        self._wire = wire

    def drained(self) -> None:
        """The wire holds no bytes any more."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def fail(self, error: ChannelError) -> None:
        """Nothing more can be sent: a sender that waits is told by `error`."""
        self._error = self._error or error
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(error)

    def write(self, frame: bytes) -> None:
        """Send a small frame without waiting."""
        if self._wire is not None:
            self._wire.write(frame)

    async def send_message(self, header: bytes, views: list[memoryview], payload_bytes: int) -> None:
        """Send a message; returns when nothing refers to the memory of `views` any more, or raises `ChannelError`.

        When it is cancelled with a message half out, the wire is aborted: no frame could follow, and it may still hold
        references to the memory.
        """
        wire = self._wire
        if wire is None or self._error is not None:
            raise self._error or ChannelLostError("the connection is not ready")
        start = encode(Kind.MESSAGE, header, payload_bytes)
        if payload_bytes <= _JOINED_BYTES:
            wire.write(b"".join((start, *views)))
            await self._written(wire, len(start) + payload_bytes)
            return
        self._inside_message = True
        try:
            wire.write(start)
            for view in views:
                await self._send_view(wire, view)
            self._inside_message = False
        finally:
            if self._inside_message:
                wire.abort()

    async def _send_view(self, wire: asyncio.Transport, view: memoryview) -> None:
        for position in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[position : position + _PIECE_BYTES]
            wire.write(piece)
            await self._written(wire, piece.nbytes)

    async def _written(self, wire: asyncio.Transport, count: int) -> None:
        """Wait until the wire holds nothing; raises what became of the connection meanwhile."""
        if wire.get_write_buffer_size():
            self._drained = drained = asyncio.get_running_loop().create_future()
            try:
                await drained
            finally:
                self._drained = None
                retrieve(drained)
            self._unyielded = 0
            return
        self._unyielded += count + _WRITE_COST
        if self._unyielded >= _TURN_BYTES:
            self._unyielded = 0
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a future as seen: who waited for it may have been cancelled in the same moment."""
    if future.done() and not future.cancelled():
        future.exception()
