"""A simulated swarm of gossiping nodes, and a liar among them: what simulations of discovery are written with.

async def scenario(world: World) -> None:
    nodes = await world.start(4)
    ...

simulate_gossip(scenario)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmavg.discovery.interface import Version
from swarmavg.discovery.link_keeper import GOSSIP_PURPOSE
from swarmavg.discovery.records import SignedRecord, sign_record
from swarmavg.errors import ChannelError, SwarmError
from swarmavg.identifiers import Address, PeerId
from swarmavg.security.identity import Identity
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.gossip_node import GossipNode
from swarmavg.transport.interface import END, Channel
from swarmavg.transport.memory import MemoryNetwork

LATENCY = 0.01
TTL = 300.0


def identity(number: int) -> Identity:
    """The same key in every run, so that a simulation can be repeated."""
    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32)))


class Node(GossipNode):
    """Listens at an address made from its number; publishes its number unless told otherwise."""

    def __init__(self, world: World, number: int, *, boot: Iterable[int], listens: bool = True, **options: Any) -> None:
        self.number = number
        super().__init__(
            identity(number),
            world.network.transport,
            listen=address_of(number) if listens else None,
            bootstrap=[address_of(other) for other in boot],
            rng=random.Random(number),  # noqa: S311  (repeatable, not secret)
            **options,
        )

    async def publish(self, topic: str = "run", value: bytes | None = None, *, ttl: float = TTL, urgent: bool = True) -> None:
        await self.directory.publish(topic, b"%d" % self.number if value is None else value, ttl=ttl, urgent=urgent)

    async def values(self, topic: str = "run") -> list[bytes]:
        return sorted([record.value for record in await self.directory.fetch(topic)])


def address_of(number: int) -> Address:
    return Address("memory", f"host{number}", 1)


class World:
    """Nodes on one simulated network. Everything still open at the end of the block is closed."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(seed=1, latency=LATENCY)
        self.nodes: list[Node] = []
        self._sides: list[list[PeerId]] = []

    def add(self, number: int, *, boot: Iterable[int] = (0,), listens: bool = True, **options: Any) -> Node:
        return self.adopt(Node(self, number, boot=boot, listens=listens, **options))

    def adopt(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def split(self, *sides: Iterable[Node]) -> None:
        """Let nothing pass between nodes of different sides, until `heal`."""
        self._sides = [[node.id for node in side] for side in sides]
        self.network.partition(*self._sides)

    def heal(self) -> None:
        self.network.heal_partition(*self._sides)

    async def start(self, count: int, *, boot: Iterable[int] = (0,), **options: Any) -> list[Node]:
        """Nodes numbered from 0, all started at the same moment."""
        nodes = [self.add(number, boot=boot, **options) for number in range(count)]
        for node in nodes:
            await node.start()
        return nodes


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    world = World()
    try:
        yield world
    finally:
        await asyncio.gather(*(node.aclose() for node in world.nodes))


def simulate_gossip(scenario: Callable[[World], Awaitable[None]]) -> None:
    """Run a scenario in virtual time; raises `AssertionError` if it leaves a task behind."""

    async def main() -> None:
        async with a_world() as world:
            await scenario(world)

    run_virtual(main)


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(holds: Callable[[], Awaitable[bool]], *, within: float, step: float = 0.002) -> float:
    """Wait until it holds; returns the virtual seconds that took."""
    started = now()
    while not await holds():
        assert now() - started <= within, f"still not so after {within} s"
        await asyncio.sleep(step)
    return now() - started


async def all_see(nodes: Iterable[Node], expected: Iterable[bytes], topic: str = "run") -> bool:
    wanted = sorted(expected)
    return all([await node.values(topic) == wanted for node in nodes])


def links(node: Node) -> list[PeerId]:
    """The node's neighbours."""
    return node.directory.linked_peers()


async def a_linked_pair(world: World, **options: Any) -> tuple[Node, Node]:
    """Two nodes that gossip; the first has published its number under ``run``."""
    one, two = await world.start(2, **options)
    await one.publish()
    await until(lambda: all_see([two], [b"0"]), within=1.0)
    return one, two


class Liar(Node):
    """A member of the swarm that speaks the protocol by hand."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number, boot=(), listens=False)
        world.nodes.append(self)

    @asynccontextmanager
    async def channel(self, victim: Node) -> AsyncIterator[Channel]:
        channel = await self.dial_address(address_of(victim.number), GOSSIP_PURPOSE, 5.0)
        try:
            yield channel
        finally:
            channel.abort("enough")

    def record(self, signer: Identity, **fields: Any) -> SignedRecord:
        given = {"topic": "run", "version": Version(9, 1), "ttl": TTL, "value": b"lie", "urgent": True, **fields}
        return sign_record(signer, self.security.swarm_id, **given)

    def forged(self, owner: Identity, **fields: Any) -> SignedRecord:
        """A record that claims another owner, under the liar's signature."""
        honest = self.record(owner, **fields)
        return SignedRecord(
            **{name: getattr(honest, name) for name in SignedRecord.__slots__ if name != "signature"},
            signature=self.identity.sign(honest.body),
        )


async def why_it_ended(channel: Channel) -> SwarmError | None:
    """Read a channel to its end; `None` if the other side ended it cleanly."""
    try:
        while await channel.receive() is not END:
            pass
    except ChannelError as error:
        return error
    return None
