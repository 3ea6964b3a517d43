"""The bytes of the in-process network: a directed link with latency and bandwidth, and the ends of a stream over two links.

A stream behaves as TCP does to those above it: in order, complete or lost, the sender held back by a window; what is sent over
a cut link arrives when the cut is healed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import Any, Final, Self, cast

from swarmavg.identifiers import PeerId

_SLICE_SECONDS: Final = 0.005
_SMALLEST_SEGMENT: Final = 4 * 1024
_LARGEST_SEGMENT: Final = 256 * 1024

_FIN: Final = "fin"
_RESET: Final = "reset"


class MemoryLink:
    """One direction between two peers. Streams that share it take turns, a segment each."""

    def __init__(self, latency: float, bandwidth: float | None, jitter: float, rng: Random) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self.jitter = jitter
        self.up = True
        self._random = rng
        self._turns: deque[MemoryWire] = deque()
        self._busy = False
        self._wires: dict[MemoryWire, None] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def join(self, wire: MemoryWire) -> None:
        self._wires[wire] = None

    def quit(self, wire: MemoryWire) -> None:
        self._wires.pop(wire, None)

    def request(self, wire: MemoryWire) -> None:
        """A stream has something to send and room to send it."""
        if wire not in self._turns:
            self._turns.append(wire)
        if not self._busy:
            self._serve()

    def delay(self) -> float:
        return self.latency + (self._random.uniform(0, self.jitter) if self.jitter else 0.0)

    def cut(self) -> None:
        self.up = False

    def heal(self) -> None:
        if self.up:
            return
        self.up = True
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()
        for wire in list(self._wires):
            wire.resume_transit()
        if not self._busy:
            self._serve()

    async def wait_until_up(self) -> None:
        while not self.up:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def reset_all(self) -> None:
        """Every stream over this link is lost, at both ends."""
        for wire in list(self._wires):
            wire.reset()

    def _serve(self) -> None:
        while self._turns and self.up and not self._busy:
            wire = self._turns.popleft()
            segment = wire.take_segment(self._segment_bytes())
            if not segment:
                continue
            self._turns.append(wire)  # dropped again when its turn comes and it has nothing
            if self.bandwidth is None:
                wire.dispatch(segment)
            else:
                self._busy = True
                loop = asyncio.get_running_loop()
                loop.call_later(len(segment) / self.bandwidth, self._served, wire, segment)

    def _served(self, wire: MemoryWire, segment: bytes) -> None:
        self._busy = False
        wire.dispatch(segment)
        self._serve()

    def _segment_bytes(self) -> int:
        if self.bandwidth is None:
            return _LARGEST_SEGMENT
        return max(_SMALLEST_SEGMENT, min(_LARGEST_SEGMENT, int(self.bandwidth * _SLICE_SECONDS)))


class MemoryWire(asyncio.Transport):
    """One end of a stream, as asyncio transports are: writes over `link`, and reads what the other end writes."""

    def __init__(self, link: MemoryLink, protocol: asyncio.BufferedProtocol, *, window: int, other_peer: PeerId) -> None:
        super().__init__({"swarmavg_peer": other_peer})
        self._link = link
        self._protocol = protocol
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
        self._reading = True
        self._delivering = False
        self._writing_paused = False
        self._fin_wanted = False
        self._fin_sent = False
        self._closing = False
        self._lost = False

    def connect(self, other: Self) -> None:
        """Join two ends and tell both protocols."""
        self._other, other._other = other, self
        self.start()
        other.start()

    def start(self) -> None:
        self._link.join(self)
        self._protocol.connection_made(self)

    # --- asyncio.Transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        if self._closing or self._fin_wanted or not view.nbytes:
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
        self._loop.call_soon(self._deliver)

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
        self._transit.append((self._loop.time() + self._link.delay(), _RESET))
        self._arm()
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
        if self._lost:
            return
        self._transit.append((self._loop.time() + self._link.delay(), item))
        self._arm()
        self._after_sending()

    def resume_transit(self) -> None:
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

    def _push(self) -> None:
        """Take copies of what was written, as far as the window allows: from then on the writer's memory is free."""
        while self._outgoing and self._in_flight < self._window:
            view, room = self._outgoing[0], self._window - self._in_flight
            if view.nbytes > room:
                self._outgoing[0] = view[room:]
            else:
                self._outgoing.popleft()
            accepted = memoryview(bytes(view[:room]))
            self._outgoing_bytes -= accepted.nbytes
            self._in_flight += accepted.nbytes
            self._accepted.append(accepted)
        if self._accepted:
            self._link.request(self)
        self._after_sending()

    def _after_sending(self) -> None:
        """Tell the protocol whether anything waits, and end the stream when nothing does and that was asked for."""
        waiting = bool(self._outgoing)
        if waiting != self._writing_paused and not self._lost:
            self._writing_paused = waiting
            (self._protocol.pause_writing if waiting else self._protocol.resume_writing)()
        if self._fin_wanted and not (waiting or self._accepted or self._on_link or self._fin_sent):
            self._transit.append((self._loop.time() + self._link.delay(), _FIN))
            self._fin_sent = True
            self._arm()
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
        self._loop.call_soon(self._protocol.connection_lost, error)
        if not self._transit:
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
        if self._lost and not self._transit:
            self._link.quit(self)
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
        if item is _RESET:
            self._reading = True
        self._deliver()

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
                    if not self._protocol.eof_received():
                        self.close()
                else:
                    self._closing = True
                    self._drop_outgoing()
                    self._lose(ConnectionResetError("reset by the other side"))
        finally:
            self._delivering = False

    def _hand_over(self, item: memoryview) -> None:
        buffer = cast(memoryview, self._protocol.get_buffer(-1))
        count = min(buffer.nbytes, item.nbytes)
        buffer[:count] = item[:count]
        if count < item.nbytes:
            self._unread.appendleft(item[count:])
        self._protocol.buffer_updated(count)
        self._other.consumed(count)

    def consumed(self, count: int) -> None:
        """The other end has read so many bytes of ours."""
        self._in_flight -= count
        if self._outgoing:
            self._push()

    def get_protocol(self) -> Any:
        return self._protocol
