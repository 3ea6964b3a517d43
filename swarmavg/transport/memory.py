"""An in-process network: links with latency, bandwidth and faults, for simulations in virtual time and for tests.

Channels run over the same connections and frames as on real backends; only the bytes travel through `memory_wire` instead of
a socket. Hosts have names that the caller makes up; ids are taken at their word.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from swarmavg.errors import ListenError, PeerUnreachableError
from swarmavg.identifiers import Address, PeerId
from swarmavg.transport.connection import Connection
from swarmavg.transport.endpoint import StreamTransport
from swarmavg.transport.interface import TransportContext
from swarmavg.transport.listener import StreamListener, Unbind
from swarmavg.transport.memory_link import Host, MemoryLink, StreamTap
from swarmavg.transport.memory_wire import MemoryWire

WINDOW_BYTES: Final = 1024 * 1024
_EVERYWHERE: Final = Host()

TapFactory: TypeAlias = Callable[[PeerId, PeerId], StreamTap]
"""``tap(source, target)`` is called once per new stream and direction."""


class MemoryNetwork:
    """A network of peers in one process; make one per simulation, in any event loop, and ask it for transports.

    `latency` is the one-way delay in seconds, `jitter` the largest random addition to it (order is kept), `bandwidth` the
    bytes per second of each directed link (`None` = no limit), shared in turns by the channels that use it. `window` is how
    many bytes a sender may have on the way or unread per channel and direction.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: float = 0.0,
        bandwidth: float | None = None,
        jitter: float = 0.0,
        window: int = WINDOW_BYTES,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 byte, got {window!r}")
        self._random = random.Random(seed)  # noqa: S311  (repeatable, not secret)
        self._defaults = (_seconds("latency", latency), _rate(bandwidth), _seconds("jitter", jitter))
        self._window = window
        self._links: dict[tuple[PeerId, PeerId], MemoryLink] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._killed: set[PeerId] = set()
        self._bound: dict[tuple[str, int], StreamListener] = {}
        self._next_port = 1
        self._hosts: dict[PeerId, Host] = {}
        self._tap: TapFactory | None = None

    def transport(self, context: TransportContext) -> MemoryTransport:
        """A transport, scheme ``memory``, of the peer that `context` names."""
        return MemoryTransport(self, context)

    # --- for simulations

    def set_host(self, peer: PeerId, host: Host) -> None:
        """Run what the network calls of this peer there, from its next stream on."""
        self._hosts[peer] = host

    def set_tap(self, tap: TapFactory | None) -> None:
        """Show the bytes of all streams opened from now on."""
        self._tap = tap

    # --- shaping

    def set_link(
        self,
        source: PeerId,
        target: PeerId,
        *,
        latency: float | None = None,
        bandwidth: float | None = None,
        jitter: float | None = None,
    ) -> None:
        """Change one directed link; what is left out stays. An infinite `bandwidth` means no limit."""
        link = self.link(source, target)
        if latency is not None:
            link.latency = _seconds("latency", latency)
        if bandwidth is not None:
            link.bandwidth = _rate(bandwidth)
        if jitter is not None:
            link.jitter = _seconds("jitter", jitter)

    def link(self, source: PeerId, target: PeerId) -> MemoryLink:
        """The directed link between two peers."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = MemoryLink(*self._defaults, self._random)
            found.up = frozenset({source, target}) not in self._cut
        return found

    # --- faults

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Nothing passes between two peers, and nobody is told, until `heal`; then what was sent meanwhile arrives."""
        self._cut.add(frozenset({a, b}))
        for link in (self.link(a, b), self.link(b, a)):
            link.cut()

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset({a, b}))
        for link in (self.link(a, b), self.link(b, a)):
            link.heal()

    def partition(self, *sides: Iterable[PeerId]) -> None:
        """Cut every pair of peers of different sides."""
        for a, b in _across(sides):
            self.cut(a, b)

    def heal_partition(self, *sides: Iterable[PeerId]) -> None:
        """Undo `partition`."""
        for a, b in _across(sides):
            self.heal(a, b)

    def stall(self, source: PeerId, target: PeerId) -> None:
        """From now on no more bytes leave `source` for `target`, until `unstall`; the link counts as up."""
        self.link(source, target).stall()

    def unstall(self, source: PeerId, target: PeerId) -> None:
        """Undo `stall`."""
        self.link(source, target).unstall()

    def kill(self, peer: PeerId, *, flush: bool = False) -> None:
        """The peer's process dies: its listeners are gone, and everybody connected to it notices at once.

        With `flush`, as after ``kill -9``: what it has sent still arrives, and each of the others notices when its reset does.
        """
        self._killed.add(peer)
        for place, listener in list(self._bound.items()):
            if listener.context.security.peer_id == peer:
                del self._bound[place]
        for (source, target), link in self._links.items():
            if flush and peer == source:
                link.orphan_all()
            elif not flush and peer in (source, target):
                link.reset_all()

    def revive(self, peer: PeerId) -> None:
        """A killed peer may dial and listen again."""
        self._killed.discard(peer)

    # --- for the transports

    def bind(self, address: Address, listener: StreamListener) -> Address:
        if listener.context.security.peer_id in self._killed:
            raise ListenError(f"cannot listen on {address}: this peer was killed")
        port = address.port or self._free_port(address.host)
        if (address.host, port) in self._bound:
            raise ListenError(f"cannot listen on {address}: somebody listens there already")
        self._bound[address.host, port] = listener
        return Address(address.scheme, address.host, port)

    def unbind(self, listener: StreamListener) -> None:
        for place in [place for place, bound in self._bound.items() if bound is listener]:
            del self._bound[place]

    async def connect(self, caller: PeerId, address: Address, connection: Connection) -> None:
        """Open a stream: one round trip, or as long as the link is cut."""
        target = self._listener_at(caller, address).context.security.peer_id
        outward, homeward = self.link(caller, target), self.link(target, caller)
        await outward.wait_until_up()
        await asyncio.sleep(outward.latency + homeward.latency)
        await outward.wait_until_up()
        listener = self._listener_at(caller, address)
        await listener.slot()
        if self._bound.get((address.host, address.port)) is not listener:
            listener.unused_slot()
            raise PeerUnreachableError(f"nobody listens at {address}")
        near, far = self._wire(outward, caller, target), self._wire(homeward, target, caller)
        near.connect(far)
        near.start(connection)
        self._host(target).run(lambda: far.start(listener.accept(f"memory peer {caller.short}")))

    def _wire(self, link: MemoryLink, source: PeerId, target: PeerId) -> MemoryWire:
        tap = None if self._tap is None else self._tap(source, target)
        return MemoryWire(link, self._host(source), window=self._window, other_peer=target, tap=tap)

    def _host(self, peer: PeerId) -> Host:
        return self._hosts.setdefault(peer, _EVERYWHERE)

    def _listener_at(self, caller: PeerId, address: Address) -> StreamListener:
        listener = self._bound.get((address.host, address.port))
        if listener is None or caller in self._killed:
            raise PeerUnreachableError(f"nobody listens at {address}")
        return listener

    def _free_port(self, host: str) -> int:
        while (host, self._next_port) in self._bound:
            self._next_port += 1
        port, self._next_port = self._next_port, self._next_port + 1
        return port


class MemoryTransport(StreamTransport):
    """The transport of one peer of a `MemoryNetwork`."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork, context: TransportContext) -> None:
        super().__init__(context)
        self._network = network

    async def _connect(self, address: Address, connection: Connection) -> None:
        await self._network.connect(self.context.security.peer_id, address, connection)

    async def _bind(self, address: Address, listener: StreamListener) -> Unbind:
        listener.bound_to(self._network.bind(address, listener))

        async def unbind() -> None:
            self._network.unbind(listener)

        return unbind


def _across(sides: tuple[Iterable[PeerId], ...]) -> list[tuple[PeerId, PeerId]]:
    groups = [sorted(side) for side in sides]
    return [
        (a, b) for index, group in enumerate(groups) for other in groups[index + 1 :] for a in group for b in other if a != b
    ]


def _seconds(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value!r}")
    return value


def _rate(value: float | None) -> float | None:
    if value is None or value == math.inf:
        return None
    if not value > 0:
        raise ValueError(f"bandwidth must be positive (bytes per second), got {value!r}")
    return value
