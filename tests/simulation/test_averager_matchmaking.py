"""Who meets whom, with real averagers and gossip over simulated links of 10 ms."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from swarmavg import MatchmakingError
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm


def tensors(count):
    return [[torch.full((20,), float(index))] for index in range(count)]


async def settled(swarm, averagers):
    """Wait until everyone knows everyone, and has nothing left to tell."""
    while any(len(averager.peer.status()["peers"]) < len(swarm.peers) - 1 for averager in averagers):
        await asyncio.sleep(0.01)
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("target", [None, 4])
def test_four_calling_together_need_no_window(target):
    async def main():
        each = tensors(4)
        async with SimulatedSwarm(directory="gossip") as swarm:
            averagers = await swarm.averagers(each, target_group_size=target)
            await settled(swarm, averagers)
            began = asyncio.get_running_loop().time()
            results = await swarm.step_all(averagers)
            assert all(result.group_size == 4 for result in results)
            assert max(result.matchmaking_seconds for result in results) < 0.3
            assert asyncio.get_running_loop().time() - began < 0.6

    run_virtual(main)


def test_two_calling_three_seconds_apart_meet():
    async def main():
        each = tensors(2)
        async with SimulatedSwarm(directory="gossip") as swarm:
            first, second = await swarm.averagers(each)
            await settled(swarm, [first, second])

            async def later():
                await asyncio.sleep(3)
                return await second.step()

            results = await asyncio.gather(first.step(), later())
            assert [result.group_size for result in results] == [2, 2]

    run_virtual(main)


def test_sixteen_in_one_bucket_are_all_grouped_in_pairs():
    async def main():
        each = tensors(16)
        async with SimulatedSwarm(directory="gossip") as swarm:
            averagers = await swarm.averagers(each, target_group_size=2)
            await settled(swarm, averagers)
            results = await swarm.step_all(averagers)
            assert [result.group_size for result in results] == [2] * 16
            assert len({result.round_id for result in results}) == 8

    run_virtual(main)


def test_five_with_a_target_of_four_make_three_and_two():
    async def main():
        each = tensors(5)
        async with SimulatedSwarm(directory="gossip") as swarm:
            averagers = await swarm.averagers(each, target_group_size=4)
            await settled(swarm, averagers)
            results = await swarm.step_all(averagers)
            assert sorted(result.group_size for result in results) == [2, 2, 3, 3, 3]

    run_virtual(main)


def test_other_models_codecs_and_prefixes_never_delay_anybody():
    from swarmavg.compression import Float16Compression

    async def main():
        async with SimulatedSwarm(directory="gossip") as swarm:
            averagers = await swarm.averagers(tensors(4))
            strangers = [
                await swarm.averager([torch.zeros(21)]),
                await swarm.averager([torch.zeros(20)], compression=Float16Compression()),
                await swarm.averager([torch.zeros(20)], target_group_size=3),
                await swarm.averager([torch.zeros(20)], prefix="other"),
                await swarm.averager([torch.zeros(20)], initial_group_bits="1"),
            ]
            await settled(swarm, averagers)
            lonely = [await stranger.step(wait=False, timeout=4) for stranger in strangers]
            results = await swarm.step_all(averagers)
            assert [result.group_size for result in results] == [4] * 4
            assert max(result.matchmaking_seconds for result in results) < 0.3
            for control, word in zip(lonely, ["shapes", "compression", "target_group_size", "nobody", "bits"], strict=True):
                with pytest.raises(MatchmakingError, match=word):
                    await control

    run_virtual(main)


def test_clients_average_through_auxiliaries_over_gossip():
    async def main():
        each = tensors(4)
        async with SimulatedSwarm(directory="gossip") as swarm:
            averagers = await swarm.averagers(each, roles=["auxiliary", "auxiliary", "client", "client"], target_group_size=4)
            await settled(swarm, averagers)
            await swarm.step_all(averagers)
            assert each[2][0].eq(2.5).all()
            assert each[3][0].eq(2.5).all()
            assert each[0][0].eq(0.0).all()

    run_virtual(main)


def test_two_clients_alone_fail_with_the_reason():
    async def main():
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(tensors(2), roles=["client"] * 2)
            with pytest.raises(MatchmakingError, match="clients cannot lead"):
                await swarm.step_all(averagers, timeout=6)

    run_virtual(main)


def test_a_peer_with_another_model_is_named_at_first_sight_with_what_differs(caplog):
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(20, 3), torch.zeros(7)])
            await swarm.averager([torch.zeros(20, 3), torch.zeros(8)])
            with pytest.raises(MatchmakingError, match=r"'shapes' \(ours: 20x3, 7\)"):
                await averager.step(timeout=4)

    with caplog.at_level(logging.WARNING, logger="swarmavg.matchmaking"):
        run_virtual(main)
    told = [record.message for record in caplog.records if "cannot be averaged with" in record.message]
    assert len(told) == 2  # each says it of the other, once
