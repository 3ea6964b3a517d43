"""The receiving half of a connection: cuts the stream into frames and finds a place for each payload.

What each frame means is decided by its owner, through `handle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from swarmavg.errors import ChannelViolationError
from swarmavg.transport.framing import Frame, FrameReader, Kind
from swarmavg.transport.inbox import NOTHING, Inbox

_RUBBISH_BYTES: Final = 16 * 1024


class Intake:
    """Between a wire, which asks `get_buffer` and reports to `received`, and the inbox of the channel that is open."""

    def __init__(self, *, max_payload: int, handle: Callable[[Frame, memoryview], None]) -> None:
        self._reader = FrameReader(max_payload=max_payload)
        self._handle = handle
        self._wire: asyncio.Transport | None = None
        self._inbox: Inbox | None = None
        self._frame: Frame | None = None  # a message whose payload is not complete
        self._held = False  # the wire is paused, because a payload has no place yet
        self._discard_budget: int | None = None
        self._rubbish: memoryview | None = None  # after the end everything is read into this

    @property
    def exhausted(self) -> bool:
        """Whether more came than `discard` allowed."""
        return self._discard_budget is not None and self._discard_budget < 0

    @property
    def unread(self) -> int:
        """Bytes that came behind the frame being handled."""
        return self._reader.unread

    def attach(self, wire: asyncio.Transport) -> None:
        self._wire = wire

    def begin(self, inbox: Inbox) -> None:
        """Messages may come, and belong into `inbox`."""
        self._inbox = inbox

    def end(self) -> None:
        """No messages may come: the other side has ended its direction."""
        self._inbox = self._discard_budget = None

    def discard(self, budget: int) -> None:
        """Throw away the messages of this channel from now on, `budget` bytes at most."""
        self._discard_budget = budget
        if self._frame is not None:
            self._drop()
        self.take_frames()

    def stop(self) -> None:
        """Nothing that still arrives is of interest, nor must it block the other side."""
        self._rubbish = memoryview(bytearray(_RUBBISH_BYTES))
        self._hold(False)

    def get_buffer(self) -> memoryview:
        return self._reader.get_buffer() if self._rubbish is None else self._rubbish

    def received(self, count: int) -> None:
        if self._rubbish is None:
            self._reader.received(count)
            if self._discard_budget is not None:
                self._discard_budget -= count

    def take_frames(self) -> None:
        """Handle what has been read, as far as there is a place for it. Raises `ChannelViolationError` and what `handle`
        raises.
        """
        while self._rubbish is None:
            if self._frame is None:
                self._frame = self._reader.next_frame()
                if self._frame is None:
                    break
            if self._frame.kind is Kind.MESSAGE and not self._message_is_complete(self._frame):
                if self._frame is None:
                    continue
                break
            frame, self._frame = self._frame, None
            self._handle(frame, self._reader.take() if frame.kind is Kind.MESSAGE else NOTHING)
        self._hold(self._frame is not None and not self._reader.filling)

    def _message_is_complete(self, frame: Frame) -> bool:
        """Lead the payload to its place; afterwards there is no frame any more if it is thrown away."""
        if self._inbox is None:
            raise ChannelViolationError("a message outside a channel")
        if self._discard_budget is not None:
            self._drop()
            return False
        if not self._reader.filling:
            target = self._inbox.place(frame.header, frame.payload_bytes)
            if target is None or self._rubbish is not None:
                return False
            self._reader.fill(target)
        return self._reader.filled

    def _drop(self) -> None:
        self._reader.skip()
        self._frame = None

    def _hold(self, held: bool) -> None:
        held = held and self._rubbish is None
        if self._wire is None or held == self._held:
            return
        self._held = held
        if held:
            self._wire.pause_reading()
        else:
            self._wire.resume_reading()
