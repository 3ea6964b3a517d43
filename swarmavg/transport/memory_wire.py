"""The bytes of the in-process network: the ends of a stream over two links.

A stream behaves as TCP does to those above it: in order, complete or lost, the sender held back by a window; what is sent over
a cut link arrives when the cut is healed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Self, cast

from swarmavg.identifiers import PeerId
from swarmavg.transport.memory_link import Host, MemoryLink, StreamTap, outside

_FIN: Final = "fin"
_RESET: Final = "reset"


class MemoryWire(asyncio.Transport):
    """One end of a stream, as asyncio transports are: writes over `link`, and reads what the other end writes.

    Its protocol runs on `host`; what arrives before `start` waits. `tap` sees what this end sends.
    """

    def __init__(self, link: MemoryLink, host: Host, *, window: int, other_peer: PeerId, tap: StreamTap | None = None) -> None:
        super().__init__({"swarmavg_peer": other_peer})
        self._link = link
        self._host = host
        self._tap = tap
        self._protocol: asyncio.BufferedProtocol | None = None
        self._window = window
        self._loop = asyncio.get_running_loop()
        self._other: MemoryWire = self
        self._outgoing: deque[memoryview] = deque()
        self._outgoing_bytes = 0
        self._accepted: deque[memoryview] = deque()  # copied, and waiting for its turn on the link
        self._on_link = 0  # segments that the link is sending
        self._in_flight = 0  # written by us, not yet read by the other end
        self._transit: deque[tuple[float, bytes | str]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._unread: deque[memoryview | str] = deque()
        self._reading = False
        self._delivering = False
        self._orphaned = False  # a reset follows what was accepted
        self._writing_paused = False
        self._fin_wanted = False
        self._fin_sent = False
        self._closing = False
        self._lost = False

    def connect(self, other: Self) -> None:
        """Join two ends, neither of which has been started."""
        self._other, other._other = other, self
        self._link.join(self)
        other._link.join(other)

    def start(self, protocol: asyncio.BufferedProtocol) -> None:
        """Tell `protocol` that the stream is there, even if it is lost already."""
        self._protocol = protocol
        if self._lost:
            self._host.call_soon(protocol.connection_lost, ConnectionResetError("reset by the other side"))
            return
        self._reading = True
        protocol.connection_made(self)
        if self._unread:
            self._host.call_soon(self._deliver)

    # --- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        if self._closing or self._fin_wanted or not view.nbytes:
            return
        if self._tap is not None:
            view = self._tap.writing(view)
            if self._closing:
                return
        self._outgoing.append(view)
        self._outgoing_bytes += view.nbytes
        self._push()

    def get_write_buffer_size(self) -> int:
        return self._outgoing_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is one rule: the protocol is paused while anything waits for room in the window."""

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._host.call_soon(self._deliver)

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self._closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._fin_wanted and not self._closing:
            self._fin_wanted = True
            self._push()

    def close(self) -> None:
        """What has been written still goes out."""
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self._unread.clear()
        self._lose_when_flushed()

    def abort(self) -> None:
        if self._lost:
            return
        self._closing = True
        self._drop_outgoing()
        outside(self._depart, _RESET)
        self._lose(None)

    # --- sending

    def take_segment(self, most: int) -> bytes:
        """Called by the link when it is this stream's turn."""
        if not self._accepted:
            return b""
        first = self._accepted[0]
        if len(first) > most:
            self._accepted[0] = first[most:]
        else:
            self._accepted.popleft()
        self._on_link += 1
        return bytes(first[:most])

    def dispatch(self, item: bytes | str) -> None:
        """The link has sent it: it arrives one delay later, after everything sent before."""
        self._on_link -= 1
        if self._lost and not self._orphaned:
            return
        self._depart(item)
        if self._orphaned:
            self._last_words()
        else:
            self._after_sending()

    def resume_transit(self) -> None:
        self._arm()

    def _depart(self, item: bytes | str) -> None:
        self._transit.append((self._loop.time() + self._link.delay(), item))
        self._arm()

    def reset(self) -> None:
        """Both ends are lost at once."""
        self.die()
        self._other.die()

    def die(self) -> None:
        if not self._lost:
            self._closing = True
            self._drop_outgoing()
            self._transit.clear()
            self._lose(ConnectionResetError("the other process died"))

    def orphan(self) -> None:
        """The process at this end is gone, and the machine sends what it was given, then a reset."""
        if self._lost:
            return
        self._closing = self._orphaned = True
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._unread.clear()
        outside(self._last_words)
        self._lose(ConnectionResetError("this process died"))

    def _last_words(self) -> None:
        if not (self._accepted or self._on_link):
            self._orphaned = False
            self._depart(_RESET)

    def _push(self) -> None:
        """Take copies of what was written, as far as the window allows: from then on the writer's memory is free."""
        while self._outgoing and self._in_flight < self._window and not self._lost:
            view, room = self._outgoing[0], self._window - self._in_flight
            if view.nbytes > room:
                self._outgoing[0] = view[room:]
            else:
                self._outgoing.popleft()
            accepted = memoryview(bytes(view[:room]))
            self._outgoing_bytes -= accepted.nbytes
            self._in_flight += accepted.nbytes
            self._accepted.append(accepted)
            if self._tap is not None:
                self._tap.accepted(accepted.nbytes)
        if self._accepted:
            outside(self._link.request, self)
        self._after_sending()

    def _after_sending(self) -> None:
        """Tell the protocol whether anything waits, and end the stream when nothing does and that was asked for."""
        waiting = bool(self._outgoing)
        if waiting != self._writing_paused and not self._lost and self._protocol is not None:
            self._writing_paused = waiting
            self._host.run(self._protocol.pause_writing if waiting else self._protocol.resume_writing)
        if self._fin_wanted and not (waiting or self._accepted or self._on_link or self._fin_sent or self._lost):
            self._fin_sent = True
            outside(self._depart, _FIN)
        if self._closing:
            self._lose_when_flushed()

    def _drop_outgoing(self) -> None:
        self._outgoing.clear()
        self._accepted.clear()
        self._outgoing_bytes = 0

    def _lose_when_flushed(self) -> None:
        if self._fin_sent and not self._lost:
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self._lost = True
        self._reading = False
        if self._protocol is not None:
            self._host.call_soon(self._protocol.connection_lost, error)
        self._quit_when_idle()

    def _quit_when_idle(self) -> None:
        if self._lost and not (self._transit or self._orphaned):
            self._link.quit(self)

    def _arm(self) -> None:
        if self._transit and self._timer is None and self._link.up:
            self._timer = self._loop.call_at(self._transit[0][0], self._land)

    def _land(self) -> None:
        self._timer = None
        if not self._link.up or not self._transit:
            return
        _, item = self._transit.popleft()
        self._arm()
        self._quit_when_idle()
        self._other.arrive(item)

    # --- receiving

    def arrive(self, item: bytes | str) -> None:
        """Called by the other end's link."""
        if self._closing:
            if isinstance(item, bytes):
                self._other.consumed(len(item))
            return
        if item is _RESET and not self._reading:
            self._unread.clear()
        self._unread.append(memoryview(item) if isinstance(item, bytes) else item)
        if item is _RESET and self._protocol is not None:
            self._reading = True
        self._host.run(self._deliver)

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._unread and self._reading and not self._closing:
                item = self._unread.popleft()
                if isinstance(item, memoryview):
                    self._hand_over(item)
                elif item is _FIN:
                    if self._protocol is None or not self._protocol.eof_received():
                        self.close()
                else:
                    self._closing = True
                    self._drop_outgoing()
                    self._lose(ConnectionResetError("reset by the other side"))
        finally:
            self._delivering = False

    def _hand_over(self, item: memoryview) -> None:
        protocol = cast(asyncio.BufferedProtocol, self._protocol)
        buffer = cast(memoryview, protocol.get_buffer(-1))
        count = min(buffer.nbytes, item.nbytes)
        buffer[:count] = item[:count]
        if count < item.nbytes:
            self._unread.appendleft(item[count:])
        protocol.buffer_updated(count)
        self._other.consumed(count)
        self._other.was_read(count)

    def consumed(self, count: int) -> None:
        """There is room for so many more bytes of ours."""
        self._in_flight -= count
        if self._outgoing:
            self._host.run(self._push)

    def was_read(self, count: int) -> None:
        """The protocol at the other end has read so many bytes of ours."""
        if self._tap is not None:
            self._tap.delivered(count)

    def get_protocol(self) -> Any:
        return self._protocol
