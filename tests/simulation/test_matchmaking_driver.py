"""The driver of matchmaking over real channels and the directory, in virtual time."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from typing import Any

import pytest

from swarmavg.errors import ClosedError, MatchmakingError
from swarmavg.peer import Peer
from swarmavg.protocol.group import Group, Role
from swarmavg.protocol.matchmaking import LookRequest
from swarmavg.protocol.matchmaking_presence import MatchConfig, decode_presence
from swarmavg.runtime.matchmaker import Matchmaker
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.matchmaking_world import CONFIG, plan_of
from swarmavg.testing.network import SimulatedSwarm


def make(peer: Peer, *, role: Role = Role.NODE, config: MatchConfig = CONFIG, **options: Any) -> Matchmaker:
    values: dict[str, Any] = {"target_group_size": None, "min_group_size": 2, "request_timeout": 3.0, "window": 5.0, **options}
    return Matchmaker(peer, prefix="run", role=role, config=config, plan_hash=plan_of, rng=random.Random(1), **values)


async def started(swarm: SimulatedSwarm, count: int, **options: Any) -> list[Matchmaker]:
    makers = []
    for _ in range(count):
        role = options.get("role", Role.NODE)
        maker = make(await swarm.peer(client_mode=role is Role.CLIENT), **options)
        await maker.start()
        makers.append(maker)
    await asyncio.sleep(1.0)
    return makers


async def close(*makers: Matchmaker) -> None:
    await asyncio.gather(*(maker.aclose() for maker in makers))


def now() -> float:
    return asyncio.get_running_loop().time()


async def find(makers: list[Matchmaker], **request: Any) -> list[Group]:
    request.setdefault("deadline", now() + 15.0)
    return list(await asyncio.gather(*(maker.find_group(LookRequest(**request)) for maker in makers)))


@pytest.mark.parametrize("target", [None, 4])
@pytest.mark.parametrize("directory", ["shared", "gossip"])
def test_four_that_call_together_are_grouped_at_once(target: int | None, directory: Any) -> None:
    async def main() -> None:
        async with SimulatedSwarm(latency=0.01, directory=directory) as swarm:
            makers = await started(swarm, 4, target_group_size=target)
            began = now()
            groups = await find(makers, gather=b"\xc0")
            assert now() - began < 0.3
            assert len(set(groups)) == 1
            assert len(groups[0].members) == 4
            for maker in makers:
                maker.round_finished(bits="", ok=True)
            again = await find(makers)
            assert again[0].group_id != groups[0].group_id
            await close(*makers)

    run_virtual(main)


def test_two_clients_and_two_auxiliaries_are_one_group() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = [*await started(swarm, 2, role=Role.AUXILIARY), *await started(swarm, 2, role=Role.CLIENT)]
            began = now()
            groups = await find(makers)
            assert now() - began < 0.5
            assert [len(group.members) for group in groups] == [4] * 4
            await close(*makers)

    run_virtual(main)


def test_a_lone_peer_fails_in_time_and_says_who_was_seen() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            (lone,) = await started(swarm, 1)
            (other,) = await started(swarm, 1, config=MatchConfig((("schema", "2 tensors"), ("compression", "float16"))))
            began = now()
            with pytest.raises(MatchmakingError, match="no group of at least 2") as caught:
                await lone.find_group(LookRequest(deadline=began + 7.0))
            assert now() == pytest.approx(began + 7.0)
            assert len(caught.value.seen) == 1
            assert "differs in 'compression' (ours: none)" in next(iter(caught.value.seen.values()))
            await close(lone, other)

    run_virtual(main)


def test_a_cancelled_search_frees_the_matchmaker_and_the_others() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 3)
            search = asyncio.create_task(makers[0].find_group(LookRequest()))
            await asyncio.sleep(0.5)
            search.cancel()
            with pytest.raises(asyncio.CancelledError):
                await search
            groups = await find(makers[1:])
            assert len(groups[0].members) == 2
            again = asyncio.create_task(makers[0].find_group(LookRequest()))
            await asyncio.sleep(0.1)
            await close(*makers)
            with pytest.raises(ClosedError):
                await again

    run_virtual(main)


def test_a_cancellation_at_any_moment_leaves_no_trace() -> None:
    async def main(cancel_at: float) -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 3)
            searches = [asyncio.create_task(maker.find_group(LookRequest(deadline=now() + 15.0))) for maker in makers]
            await asyncio.sleep(cancel_at)
            searches[0].cancel()
            outcomes = await asyncio.gather(*searches, return_exceptions=True)
            assert all(isinstance(outcome, Group | asyncio.CancelledError) for outcome in outcomes)
            for maker, outcome in zip(makers, outcomes, strict=True):
                if isinstance(outcome, Group):
                    maker.round_finished(bits="", ok=True)
            groups = await find(makers)
            assert len(groups[0].members) == 3
            await close(*makers)

    for step in range(0, 140, 5):
        run_virtual(functools.partial(main, step / 1000))


def test_a_killed_leader_costs_one_request_timeout_at_most() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 4)
            idle = await started(swarm, 1)  # it holds the group up, so that there is time to kill its leader
            began = now()
            searches = [asyncio.create_task(maker.find_group(LookRequest(deadline=now() + 30.0))) for maker in makers]
            await asyncio.sleep(0.5)
            leader = next(i for i, maker in enumerate(makers) if maker._machine.state.value == "leading")
            swarm.network.kill(makers[leader]._hub.id)
            rest = [search for index, search in enumerate(searches) if index != leader]
            groups = await asyncio.gather(*rest)
            assert now() - began < 5.0 + 3.0 + 0.5
            assert {len(group.members) for group in groups} == {3}
            searches[leader].cancel()
            await asyncio.gather(searches[leader], return_exceptions=True)
            await close(*makers, *idle)

    run_virtual(main)


def test_a_begin_that_reached_one_member_can_be_adopted_by_another() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 3)
            searches = {maker: asyncio.create_task(maker.find_group(LookRequest(deadline=now() + 15.0))) for maker in makers}
            leader = None
            while leader is None:  # a moment at which a leader has accepted both others
                await asyncio.sleep(0.001)
                leader = next((m for m in makers if len(m._machine._leader.followers) == 2), None)
                done = [m for m in makers if searches[m].done()]
                if done:
                    break
            first = next(iter(done)) if leader is None else leader
            group = await searches[first]
            late = [maker for maker in makers if not searches[maker].done()]
            assert late, "somebody's own copy is still under way"
            for maker in late:
                assert maker.adopt(b"nonsense") is None
                assert maker.adopt(group.signed) == group
                assert await searches[maker] == group
            await close(*makers)

    run_virtual(main)


def test_bits_set_while_idle_are_shown_and_while_searching_are_not() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            (maker,) = await started(swarm, 1)

            async def shown() -> str:
                await asyncio.sleep(0.1)
                (record,) = await maker._hub.directory.fetch("run.match")
                return decode_presence(record.value).bits

            maker.round_state(bits="01")
            assert await shown() == "01"
            search = asyncio.create_task(maker.find_group(LookRequest(bits="10")))
            await asyncio.sleep(0.1)
            maker.round_state(bits="11")
            assert await shown() == "10"
            search.cancel()
            await asyncio.gather(search, return_exceptions=True)
            maker.round_state(bits="11")
            assert await shown() == "11"
            await close(maker)

    run_virtual(main)


def test_garbage_from_one_peer_hurts_nobody_else() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 2)
            stranger = await swarm.peer()
            await asyncio.sleep(1.0)
            await stranger.directory.publish("run.match", b"garbage", ttl=30.0, urgent=True)
            for maker in makers:
                channel = await stranger.open_channel(maker._hub.id, "match:run", timeout=1.0)
                await channel.send(b"\xff\x00garbage")
            groups = await find(makers)
            assert len(groups[0].members) == 2
            await close(*makers)

    run_virtual(main)


def test_idle_links_are_closed_and_reopened() -> None:
    async def main() -> None:
        async with SimulatedSwarm() as swarm:
            makers = await started(swarm, 2)
            for _ in range(3):
                await find(makers, deadline=math.inf)
                for maker in makers:
                    maker.round_finished(bits="", ok=True)
                await asyncio.sleep(60.0)
                assert not any(maker._links._links for maker in makers)
                assert not any(maker._links._open for maker in makers)
            await close(*makers)

    run_virtual(main)
