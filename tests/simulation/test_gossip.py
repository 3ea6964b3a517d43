"""Gossip in virtual time: swarms that start in any order, split, and lose members."""

import asyncio
from typing import Any

import pytest

from swarmavg.discovery.gossip import GossipSettings
from swarmavg.discovery.store import StoreLimits
from swarmavg.discovery.topology import DIALLED_LINKS, FULL_MESH
from swarmavg.testing.gossip_world import (
    LATENCY,
    Node,
    World,
    a_linked_pair,
    address_of,
    all_see,
    links,
    now,
    simulate_gossip,
    until,
)

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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_records_that_are_not_urgent_arrive_by_comparison() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(4)
        await asyncio.sleep(1.0)
        await nodes[1].publish(urgent=False)
        await until(lambda: all_see(nodes, [b"1"]), within=6.0)

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


# Starting and healing


def test_start_returns_at_once_though_nobody_is_there() -> None:
    async def scenario(world: World) -> None:
        node = world.add(1, boot=[8, 9])
        await node.start()
        assert now() == 0.0
        await node.publish()
        assert await node.values() == [b"1"]

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_crossing_dials_end_as_one_link_that_works() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(3, boot=[0, 1, 2])
        await asyncio.sleep(0.5)
        assert [len(links(node)) for node in nodes] == [2, 2, 2]
        await asyncio.sleep(20.0)
        await nodes[0].publish()
        took = await until(lambda: all_see(nodes, [b"0"]), within=1.0)
        assert took <= 0.03

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_clients_of_a_large_swarm_keep_several_links() -> None:
    async def scenario(world: World) -> None:
        await world.start(FULL_MESH + 4)
        client = await world.add(99, listens=False).start()
        await asyncio.sleep(5.0)
        assert 3 <= len(links(client)) < FULL_MESH

    simulate_gossip(scenario)


def test_changed_addresses_are_told_at_once() -> None:
    async def scenario(world: World) -> None:
        one, two = await a_linked_pair(world)
        one.announce([])
        await asyncio.sleep(2 * LATENCY)
        assert two.directory.addresses_of(one.id) == []
        assert one.id in two.directory.known_peers()

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


def test_closing_with_neighbours_that_do_not_answer_is_bounded() -> None:
    async def scenario(world: World) -> None:
        nodes = await world.start(3)
        await asyncio.sleep(1.0)
        world.split(nodes[:1], nodes[1:])
        started = now()
        await nodes[0].directory.aclose()
        assert now() - started <= 2.5

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)


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

        simulate_gossip(scenario)
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

    simulate_gossip(scenario)


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

    simulate_gossip(scenario)
