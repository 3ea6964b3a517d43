"""What streams of the in-process network run over: a directed link with latency and bandwidth, which they share in turns.

What the network does, it does outside the context of whoever caused it (`outside`); what a peer does, it does on its `Host`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import TYPE_CHECKING, Final, Protocol, TypeVarTuple

if TYPE_CHECKING:
    from swarmavg.transport.memory_wire import MemoryWire

Ts = TypeVarTuple("Ts")

_SLICE_SECONDS: Final = 0.005
_SMALLEST_SEGMENT: Final = 4 * 1024
_LARGEST_SEGMENT: Final = 256 * 1024


class Host:
    """Where a peer's code runs. This one runs it at once; a simulation may hold it up or drop it."""

    def run(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Now, or when the host runs again."""
        callback(*args)

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """In the next turn of the event loop."""
        asyncio.get_running_loop().call_soon(callback, *args)


class StreamTap(Protocol):
    """Sees the bytes of one direction of one stream. May call any fault of the network, also for the peer that sends."""

    def writing(self, data: memoryview) -> memoryview:
        """The sender hands bytes to the stream; what is returned, of the same length, goes on in their place."""

    def accepted(self, count: int) -> None:
        """So many more bytes are on their way: they arrive even if the sender dies now."""

    def delivered(self, count: int) -> None:
        """The receiver has read so many more."""


class MemoryLink:
    """One direction between two peers. Streams that share it take turns, a segment each."""

    def __init__(self, latency: float, bandwidth: float | None, jitter: float, rng: Random) -> None:
        self.latency = latency
        self.bandwidth = bandwidth
        self.jitter = jitter
        self.up = True
        self.stalled = False
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
        outside(self._resume)

    def stall(self) -> None:
        """What is under way arrives, and nothing more leaves, until `unstall`; the link counts as up."""
        self.stalled = True

    def unstall(self) -> None:
        self.stalled = False
        if not self._busy:
            outside(self._serve)

    async def wait_until_up(self) -> None:
        while not self.up:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def reset_all(self) -> None:
        """Every stream over this link is lost, at both ends."""
        for wire in list(self._wires):
            wire.reset()

    def orphan_all(self) -> None:
        """The process at the near end is gone: what its streams have accepted still arrives, then a reset."""
        for wire in list(self._wires):
            wire.orphan()

    def _resume(self) -> None:
        for wire in list(self._wires):
            wire.resume_transit()
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        while self._turns and self.up and not self.stalled and not self._busy:
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


def outside(callback: Callable[[*Ts], object], *args: *Ts) -> None:
    """Run it now, as nobody: what it starts belongs to no peer."""
    Context().run(callback, *args)
