"""Gossip in virtual time with members that lie, flood, replay or do not listen: only they suffer."""

import asyncio

import pytest

from swarmavg.discovery.gossip import MAX_BAD_RECORDS, GossipSettings
from swarmavg.discovery.gossip_messages import Digest, Passed, Records, decode_message
from swarmavg.discovery.interface import MAX_VALUE_BYTES, Version
from swarmavg.discovery.link_keeper import AVOID_SECONDS
from swarmavg.discovery.records import SignedRecord, sign_record
from swarmavg.discovery.store import StoreLimits
from swarmavg.errors import ChannelError, ChannelRefusedError, DirectoryError
from swarmavg.identifiers import PeerId
from swarmavg.testing.gossip_world import (
    TTL,
    Liar,
    Node,
    World,
    a_linked_pair,
    all_see,
    identity,
    links,
    simulate_gossip,
    until,
    why_it_ended,
)
from swarmavg.transport.interface import END, Channel


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_a_payload_is_refused_before_memory_is_spent_on_it() -> None:
    async def scenario(world: World) -> None:
        one, _ = await a_linked_pair(world)
        liar = Liar(world, 50)
        async with liar.channel(one) as channel:
            await channel.send(Digest(b"d" * 128).encode(), bytes(1_000_000))
            error = await why_it_ended(channel)
        assert isinstance(error, ChannelError)
        assert liar.id not in links(one)

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_an_owner_over_its_quota_is_told_so() -> None:
    async def scenario(world: World) -> None:
        node = await world.add(0, settings=FLOODED).start()
        with pytest.raises(DirectoryError, match="over quota"):
            for number in range(20):
                await node.publish(f"run.{number}")
        await node.directory.withdraw("run.0")
        await node.publish("run.1", b"replacing is allowed")

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)
