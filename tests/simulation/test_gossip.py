"""Gossip in virtual time: swarms that start in any order, split, lose members and harbour liars."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmavg.discovery.gossip import MAX_BAD_RECORDS, GossipSettings
from swarmavg.discovery.gossip_messages import Digest, Passed, Records, decode_message
from swarmavg.discovery.interface import MAX_VALUE_BYTES, Version
from swarmavg.discovery.link_keeper import AVOID_SECONDS, GOSSIP_PURPOSE
from swarmavg.discovery.records import SignedRecord, sign_record
from swarmavg.discovery.store import StoreLimits
from swarmavg.discovery.topology import DIALLED_LINKS, FULL_MESH
from swarmavg.errors import ChannelError, ChannelRefusedError, DirectoryError, SwarmError
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

    def __init__(self, world: "World", number: int, *, boot: Iterable[int], listens: bool = True, **options: Any) -> None:
        self.number = number
        super().__init__(
            identity(number),
            world.network.transport,
            listen=address_of(number) if listens else None,
            bootstrap=[address_of(other) for other in boot],
            rng=random.Random(number),
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
        self._sides = [[node.id for node in side] for side in sides]
        self.network.partition(*self._sides)

    def heal(self) -> None:
        self.network.heal_partition(*self._sides)

    async def start(self, count: int, *, boot: Iterable[int] = (0,), **options: Any) -> list[Node]:
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


def simulate(scenario: Callable[[World], Awaitable[None]]) -> None:
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
    return node.directory.linked_peers()


async def a_linked_pair(world: World, **options: Any) -> tuple[Node, Node]:
    one, two = await world.start(2, **options)
    await one.publish()
    await until(lambda: all_see([two], [b"0"]), within=1.0)
    return one, two


# Spreading


def test_four_that_start_together_see_each_other_within_80_ms() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        for node in nodes:
            await node.publish()
        took = await until(lambda: all_see(nodes, [b"0", b"1", b"2", b"3"]), within=1.0)
        assert took <= 0.080, took
        await asyncio.sleep(1.0)
        assert [len(links(node)) for node in nodes] == [3, 3, 3, 3]
        assert all(len(node.directory.known_peers()) == 3 for node in nodes)

    simulate(scenario)


def test_an_urgent_record_crosses_a_standing_mesh_in_one_hop() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        await asyncio.sleep(2.0)
        await nodes[2].publish()
        took = await until(lambda: all_see(nodes, [b"2"]), within=1.0, step=0.0005)
        assert took <= LATENCY + 0.002
        await nodes[2].directory.withdraw("run")
        took = await until(lambda: all_see(nodes, []), within=1.0, step=0.0005)
        assert took <= LATENCY + 0.002

    simulate(scenario)


def test_records_that_are_not_urgent_arrive_by_comparison() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        await asyncio.sleep(1.0)
        await nodes[1].publish(urgent=False)
        await until(lambda: all_see(nodes, [b"1"]), within=6.0)

    simulate(scenario)


def test_forty_converge_with_few_links_each() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(40)
        for node in nodes:
            await node.publish()
        expected = [b"%d" % n for n in range(40)]
        await until(lambda: all_see(nodes, expected), within=1.0, step=0.02)
        await asyncio.sleep(10.0)
        degrees = [len(links(node)) for node in nodes]
        assert min(degrees) >= 5
        assert sum(degrees) / 40 <= 16
        for node in nodes[1:20]:
            await node.directory.withdraw("run")
        left = [value for n, value in enumerate(expected) if not 1 <= n < 20]
        await until(lambda: all_see(nodes, left), within=0.5, step=0.02)
        assert all(len(node.directory.known_peers()) == 39 for node in nodes)

    simulate(scenario)


def test_many_records_reach_a_newcomer_by_repair_without_waiting_for_the_next_comparisons() -> None:
    async def scenario(world: World) -> None:
        limits = StoreLimits(records_per_owner=4000, bytes_per_owner=2**23)
        options: dict[str, Any] = {"settings": GossipSettings(limits=limits)}
        old = await world.add(0, boot=(), **options).start()
        for number in range(2500):
            await old.publish(f"run.{number}", urgent=False)
        late = await world.add(1, **options).start()
        await until(lambda: knows(late, 2500), within=2.0, step=0.05)
        assert await late.values("run.2499") == [b"0"]

    async def knows(node: Node, count: int) -> bool:
        return bool(node.directory.status()["records"] >= count)

    simulate(scenario)


def test_in_a_large_swarm_whom_everybody_dials_sends_some_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmavg.discovery.link_keeper.MAX_ACCEPTED", 8)

    async def scenario(world: World) -> None:
        nodes = await world.start(26)
        await asyncio.sleep(20.0)
        assert all(len(links(node)) <= 8 + DIALLED_LINKS for node in nodes)
        assert all(len(links(node)) >= 3 for node in nodes)
        for node in nodes:
            await node.publish()
        await until(lambda: all_see(nodes, [b"%d" % n for n in range(26)]), within=0.2, step=0.01)

    simulate(scenario)


# Starting and healing


def test_start_returns_at_once_though_nobody_is_there() -> None:
    async def scenario(world: World) -> None:
        node = world.add(1, boot=[8, 9])
        await node.start()
        assert now() == 0.0
        await node.publish()
        assert await node.values() == [b"1"]

    simulate(scenario)


def test_a_bootstrap_peer_that_comes_late_is_found() -> None:
    async def scenario(world: World) -> None:
        early = [await world.add(number).start() for number in (1, 2, 3)]
        for node in early:
            await node.publish()
        await asyncio.sleep(400.0)
        assert [links(node) for node in early] == [[], [], []]
        for node in early:
            await node.publish()
        await world.add(0, boot=()).start()
        await until(lambda: all_see(early, [b"1", b"2", b"3"]), within=35.0, step=0.1)

    simulate(scenario)


class Reborn(Node):
    """Listens where the first node did, with another key."""

    def __init__(self, world: World, number: int, **options: Any) -> None:
        super().__init__(world, number, **options)
        self._listen = address_of(0)


def test_a_bootstrap_peer_that_restarts_with_another_key_is_found_again() -> None:
    async def scenario(world: World) -> None:
        _, two = await a_linked_pair(world, boot=[0])
        await world.nodes[0].aclose()
        await asyncio.sleep(100.0)
        reborn = await world.adopt(Reborn(world, 7, boot=[])).start()
        await reborn.publish("run", b"new")
        await until(lambda: all_see([two], [b"new"]), within=35.0, step=0.1)

    simulate(scenario)


def test_a_split_swarm_heals_though_each_half_has_forgotten_the_other() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(6)
        await asyncio.sleep(2.0)
        left, right = nodes[:3], nodes[3:]
        world.split(left, right)
        await asyncio.sleep(200.0)
        assert all(set(links(node)) <= {other.id for other in left} for node in left)
        assert all(set(node.directory.known_peers()) <= {other.id for other in right} for node in right)
        await left[1].publish()
        await right[1].publish()
        await until(lambda: all_see(left, [b"1"]), within=3.0)
        world.heal()
        await until(lambda: all_see(nodes, [b"1", b"4"]), within=125.0, step=0.1)
        await asyncio.sleep(30.0)
        assert [len(links(node)) for node in nodes] == [5] * 6

    simulate(scenario)


def test_a_split_swarm_heals_without_the_peer_that_brought_it_together() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(5)
        await asyncio.sleep(2.0)
        await nodes[0].aclose()
        world.split(nodes[1:3], nodes[3:])
        await asyncio.sleep(300.0)
        for node in nodes[1:]:
            assert len(node.directory.known_peers()) == 1
            await node.publish()
        world.heal()
        await until(lambda: all_see(nodes[1:], [b"1", b"2", b"3", b"4"]), within=125.0, step=0.1)

    simulate(scenario)


def test_crossing_dials_end_as_one_link_that_works() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(3, boot=[0, 1, 2])
        await asyncio.sleep(0.5)
        assert [len(links(node)) for node in nodes] == [2, 2, 2]
        await asyncio.sleep(20.0)
        await nodes[0].publish()
        took = await until(lambda: all_see(nodes, [b"0"]), within=1.0)
        assert took <= 0.03

    simulate(scenario)


def test_clients_only_dial_and_reach_each_other_by_way_of_others() -> None:
    async def scenario(world: World) -> None:
        server = await world.add(0, boot=()).start()
        clients = [await world.add(number, listens=False).start() for number in (1, 2, 3)]
        for node in clients:
            await node.publish()
        await until(lambda: all_see([server, *clients], [b"1", b"2", b"3"]), within=0.2)
        await asyncio.sleep(5.0)
        assert [len(links(node)) for node in clients] == [1, 1, 1]
        assert len(links(server)) == 3
        assert clients[0].directory.addresses_of(server.id) == server.own_addresses()
        assert clients[0].directory.addresses_of(clients[1].id) == []
        assert clients[1].id in clients[0].directory.known_peers()

    simulate(scenario)


def test_clients_of_a_large_swarm_keep_several_links() -> None:
    async def scenario(world: World) -> None:
        await world.start(FULL_MESH + 4)
        client = await world.add(99, listens=False).start()
        await asyncio.sleep(5.0)
        assert 3 <= len(links(client)) < FULL_MESH

    simulate(scenario)


def test_changed_addresses_are_told_at_once() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        one.announce([])
        await asyncio.sleep(2 * LATENCY)
        assert two.directory.addresses_of(one.id) == []
        assert one.id in two.directory.known_peers()

    simulate(scenario)


# Ending


def test_records_of_a_killed_peer_expire_and_its_links_end() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        for node in nodes:
            await node.publish(ttl=40.0)
        await until(lambda: all_see(nodes, [b"0", b"1", b"2", b"3"]), within=1.0)
        world.split(nodes[3:], nodes[:3])
        await asyncio.sleep(20.0)
        assert all(nodes[3].id not in links(node) for node in nodes[:3]), "silence was noticed"
        assert await all_see(nodes[:3], [b"0", b"1", b"2", b"3"]), "but its records live"
        for node in nodes[:3]:
            await node.publish(ttl=200.0)
        await asyncio.sleep(20.5)
        assert await all_see(nodes[:3], [b"0", b"1", b"2"])
        await asyncio.sleep(60.0)
        assert await all_see(nodes[:3], [b"0", b"1", b"2"]), "and do not come back"
        assert all(nodes[3].id not in node.directory.known_peers() for node in nodes[:3])

    simulate(scenario)


def test_closing_says_goodbye_to_the_whole_swarm() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        await nodes[3].publish()
        await until(lambda: all_see(nodes, [b"3"]), within=1.0)
        started = now()
        await nodes[3].directory.aclose()
        assert now() - started <= 1.0
        await until(lambda: all_see(nodes[:3], []), within=0.1)
        assert all(nodes[3].id not in node.directory.known_peers() for node in nodes[:3])
        await asyncio.sleep(60.0)
        assert all(len(links(node)) == 2 for node in nodes[:3])

    simulate(scenario)


def test_closing_with_neighbours_that_do_not_answer_is_bounded() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(3)
        await asyncio.sleep(1.0)
        world.split(nodes[:1], nodes[1:])
        started = now()
        await nodes[0].directory.aclose()
        assert now() - started <= 2.5

    simulate(scenario)


def test_a_relay_passes_on_how_old_a_record_is() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        await one.publish("aging", ttl=50.0)
        await asyncio.sleep(30.0)
        late = await world.add(2, boot=[1]).start()
        world.split([one], [late])
        await until(lambda: all_see([late], [b"0"], "aging"), within=5.0)
        (record,) = await late.directory.fetch("aging")
        assert record.expires_in <= 50.0 - 30.0
        await until(lambda: all_see([one, two, late], [], "aging"), within=21.0, step=0.1)

    simulate(scenario)


def test_the_same_seeds_give_the_same_history() -> None:
    def history() -> list[tuple[float, int]]:
        events: list[tuple[float, int]] = []

        async def scenario(world: World) -> None:
            nodes = await world.start(20, incarnation=1)
            for node in nodes:
                await node.publish()
            for _ in range(20):
                await asyncio.sleep(0.05)
                events.append((now(), sum(hash(tuple(links(node))) for node in nodes)))

        simulate(scenario)
        return events

    assert history() == history()


# Earlier lives of the same key


def test_a_restarted_peer_overrules_what_its_earlier_run_left_though_its_clock_went_back() -> None:
    async def scenario(world: World) -> None:
        server = await world.add(0, boot=(), incarnation=5).start()
        first = await world.add(1, incarnation=1000).start()
        await first.publish("run", b"old")
        await first.publish("left over", b"old")
        await until(lambda: all_see([server], [b"old"], "left over"), within=1.0)
        world.split([first], [server])
        await asyncio.sleep(15.0)
        await first.aclose()
        world.heal()
        again = await world.add(1, incarnation=500).start()
        await again.publish("run", b"new")
        await until(lambda: all_see([server, again], [b"new"]), within=3.0)
        await until(lambda: all_see([server, again], [], "left over"), within=3.0)

    simulate(scenario)


def test_a_restarted_peer_is_told_when_only_the_memory_of_its_earlier_run_is_left() -> None:
    async def scenario(world: World) -> None:
        server = await world.add(0, boot=(), incarnation=5).start()
        first = await world.add(1, incarnation=1000).start()
        await first.publish("run", b"old", ttl=5.0)
        await until(lambda: all_see([server], [b"old"]), within=1.0)
        world.split([first], [server])
        await asyncio.sleep(90.0)
        await first.aclose()
        world.heal()
        again = await world.add(1, incarnation=500).start()
        await again.publish("run", b"new")
        await until(lambda: all_see([server, again], [b"new"]), within=3.0)
        assert again.id in server.directory.known_peers()

    simulate(scenario)


def test_a_lie_about_an_earlier_run_cannot_use_up_the_version_numbers() -> None:
    async def scenario(world: World) -> None:
        one, _ = await a_linked_pair(world, incarnation=5)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            await channel.send(Passed("run", Version(2**60, 0)).encode())
            await asyncio.sleep(0.1)
            await one.publish()
            (record,) = await one.directory.fetch("run")
            assert record.version.incarnation == 5

    simulate(scenario)


# Liars


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
    try:
        while await channel.receive() is not END:
            pass
    except ChannelError as error:
        return error
    return None


def test_forged_records_are_dropped_and_counted_and_their_source_is_left() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            for number in range(MAX_BAD_RECORDS - 1):
                record = liar.forged(two.identity, version=Version(2**50, number))
                await channel.send(Records(((record, 0.0),)).encode())
            await asyncio.sleep(0.1)
            assert one.directory.status()["forged"] == MAX_BAD_RECORDS - 1
            assert liar.id in links(one)
            await channel.send(Records(((liar.forged(two.identity), 0.0),)).encode())
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelRefusedError)
        assert error.code == "malformed"
        assert await all_see([one, two], [b"0"])
        assert two.directory.status()["forged"] == 0, "nothing forged is passed on"
        await two.publish()
        await until(lambda: all_see([one, two], [b"0", b"1"]), within=0.1)

    simulate(scenario)


def test_a_record_signed_for_another_swarm_is_a_forgery() -> None:
    async def scenario(world: World) -> None:
        one, _ = await a_linked_pair(world)
        liar = Liar(world, 50)
        record = sign_record(liar.identity, b"x" * 32, topic="run", version=Version(1, 1), ttl=TTL, value=b"stray")
        async with liar.channel(one) as channel:
            await channel.send(Records(((record, 0.0),)).encode())
            await asyncio.sleep(0.1)
        assert one.directory.status()["forged"] == 1
        assert await one.values() == [b"0"]

    simulate(scenario)


def test_replayed_records_neither_replace_newer_ones_nor_come_back_to_life() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            await two.publish("run", b"first")
            old = await overheard(channel, two.id)
            await two.publish("run", b"second")
            await until(lambda: all_see([one, two], [b"0", b"second"]), within=0.1)
            await channel.send(Records(((old, 0.0),)).encode())
            await asyncio.sleep(0.1)
            assert await all_see([one, two], [b"0", b"second"])
        await two.directory.withdraw("run")
        await asyncio.sleep(2 * TTL)  # the tombstone is over as well
        async with liar.channel(one) as channel:
            await channel.send(Records(((old, 0.0),)).encode())
            await asyncio.sleep(5.0)
            assert b"first" not in await one.values() + await two.values()

    async def overheard(channel: Channel, owner: PeerId) -> SignedRecord:
        while (message := await channel.receive()) is not END:
            decoded = decode_message(message.header)
            if isinstance(decoded, Records):
                found = [record for record, _ in decoded.entries if (record.owner, record.topic) == (owner, "run")]
                if found:
                    return found[0]
        raise AssertionError("nothing was heard")

    simulate(scenario)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xc1\xc1", b"\x93", Digest(b"d" * 7).encode(), b"\x91\xa7unknown", b"\x92\xa6digest\xc3"],
    ids=["empty", "not msgpack", "cut short", "digest of an odd size", "unknown", "wrong type"],
)
def test_a_peer_that_sends_garbage_is_cut_off_and_avoided_and_only_that_one(garbage: bytes) -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            await channel.send(garbage)
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelRefusedError)
        assert error.code == "malformed"
        async with liar.channel(one) as channel:
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelRefusedError)
        assert error.code == "avoided"
        assert links(one) == [two.id]
        await asyncio.sleep(AVOID_SECONDS)
        async with liar.channel(one) as channel:
            await asyncio.sleep(1.0)
            assert liar.id in links(one), "not for ever"

    simulate(scenario)


def test_a_payload_is_refused_before_memory_is_spent_on_it() -> None:
    async def scenario(world: World) -> None:
        one, _ = await a_linked_pair(world)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            await channel.send(Digest(b"d" * 128).encode(), bytes(1_000_000))
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelError)
        assert liar.id not in links(one)

    simulate(scenario)


def test_an_oversized_value_ends_the_link_that_brought_it() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        liar = Liar(world, 50)
        oversized = SignedRecord(
            **{
                **{name: getattr(liar.record(liar.identity), name) for name in SignedRecord.__slots__},
                "body": liar.record(liar.identity, value=b"x" * MAX_VALUE_BYTES).body.replace(b"x", b"yy", 1),
            }
        )
        async with liar.channel(one) as channel:
            await channel.send(Records(((oversized, 0.0),)).encode())
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelRefusedError)
        assert links(one) == [two.id]

    simulate(scenario)


FLOODED = GossipSettings(limits=StoreLimits(records=400, records_per_source=100, records_per_owner=8, bytes_per_owner=100_000))


def test_a_flood_fills_only_its_own_quota() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world, settings=FLOODED)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            for number in range(1000, 1600):
                record = liar.record(identity(number), urgent=False)
                await channel.send(Records(((record, 0.0),)).encode())
            await asyncio.sleep(0.1)
            assert one.directory.status()["over quota"] >= 500
            assert one.directory.status()["records"] <= 110
            await two.publish()
            await until(lambda: contains(one, b"1"), within=0.1)
            await one.publish("run", b"own")
            await until(lambda: contains(two, b"own"), within=0.1)
        assert await one.values("run") != []

    async def contains(node: Node, value: bytes) -> bool:
        return value in await node.values()

    simulate(scenario)


def test_what_quotas_refuse_is_not_offered_again_and_again() -> None:
    async def scenario(world: World) -> None:
        generous = GossipSettings(limits=StoreLimits(records_per_owner=2000, bytes_per_owner=2**22))
        rich = await world.add(0, boot=(), settings=generous).start()
        for number in range(1000):
            await rich.publish(f"run.{number}", urgent=False)
        poor = await world.add(1, settings=FLOODED).start()
        await asyncio.sleep(20.0)
        assert poor.directory.status()["over quota"] <= 512 * 20 / 1.5, "one bounded batch for each periodic comparison"
        assert links(poor) == [rich.id]

    simulate(scenario)


def test_an_owner_over_its_quota_is_told_so() -> None:
    async def scenario(world: World) -> None:
        node = await world.add(0, settings=FLOODED).start()
        with pytest.raises(DirectoryError, match="over quota"):
            for number in range(20):
                await node.publish(f"run.{number}")
        await node.directory.withdraw("run.0")
        await node.publish("run.1", b"replacing is allowed")

    simulate(scenario)


def test_a_neighbour_that_never_reads_costs_no_memory_and_is_dropped() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        deaf = Liar(world, 50)
        async with deaf.channel(one):
            await asyncio.sleep(0.1)
            assert deaf.id in links(one)
            for number in range(500):
                await one.publish("run", b"%d" % number * 1000)
                await asyncio.sleep(0.001)
            waiting = one.directory._keeper.links[deaf.id]._records
            assert len(waiting) <= 4, "only what to send, not what was missed"
            await until(lambda: all_see([two], [b"499" * 1000]), within=0.05)
            await until(lambda: dropped(one, deaf), within=60.0, step=0.5)

    async def dropped(node: Node, other: Node) -> bool:
        return other.id not in links(node)

    simulate(scenario)
