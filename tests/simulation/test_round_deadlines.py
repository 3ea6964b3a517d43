"""Default deadlines: from loopback to a slow uplink nobody sets a timeout, and whoever moves, however slowly, stays."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmavg import ExclusionCode, FencedError
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.network import SimulatedSwarm

MEGABIT = 125_000.0
"""Bytes per second."""


def each(count, elements):
    return [[torch.full((elements,), float(number))] for number in range(count)]


def uplink(swarm, number, bandwidth):
    """Everything that a peer sends goes over a line of its own, which its channels to all others share."""
    others = [peer for peer in swarm.ids if peer != swarm.ids[number]]
    for other in others:
        swarm.network.set_link(swarm.ids[number], other, bandwidth=bandwidth / len(others))


@pytest.mark.parametrize("latency", [0.0, 0.1])
def test_four_peers_with_one_megabit_each_average_four_megabytes_with_default_timeouts(latency):
    async def main():
        tensors = each(4, 1_000_000)
        async with SimulatedSwarm(latency=latency) as swarm:
            averagers = await swarm.averagers(tensors, target_group_size=4)
            for number in range(4):
                uplink(swarm, number, MEGABIT)
            began = asyncio.get_running_loop().time()
            results = await swarm.step_all(averagers)
            assert asyncio.get_running_loop().time() - began > 30  # far beyond every silence that is granted
            for result, own in zip(results, tensors, strict=True):
                assert result.excluded == {}
                assert result.fraction == 1.0
                assert own[0].eq(1.5).all()

    run_virtual(main)


def test_one_peer_that_is_a_hundred_times_slower_than_the_others_stays():
    async def main():
        tensors = each(4, 250_000)
        async with SimulatedSwarm(latency=0.01, bandwidth=100 * MEGABIT) as swarm:
            averagers = await swarm.averagers(tensors, target_group_size=4)
            uplink(swarm, 2, MEGABIT / 4)
            results = await swarm.step_all(averagers)
            assert all(result.excluded == {} for result in results)
            assert all(own[0].eq(1.5).all() for own in tensors)

    run_virtual(main)


def test_a_line_that_pauses_for_less_than_the_granted_silence_costs_nobody_a_place():
    async def main():
        tensors = each(3, 100_000)
        plan = FaultPlan().stall(0, 1, seconds=8).at_part(2)
        async with SimulatedSwarm(bandwidth=10 * MEGABIT, faults=plan) as swarm:
            averagers = await swarm.averagers(tensors, target_group_size=3, part_size_bytes=20_000)
            results = await swarm.step_all(averagers)
            assert all(result.excluded == {} for result in results)
            assert all(own[0].eq(1.0).all() for own in tensors)

    run_virtual(main)


def test_explicit_timeouts_bind():
    async def main():
        tensors = each(3, 100_000)
        plan = FaultPlan().freeze(2, seconds=30).at_part(2)
        async with SimulatedSwarm(bandwidth=10 * MEGABIT, faults=plan) as swarm:
            await swarm.averagers(tensors, target_group_size=3, part_size_bytes=20_000, sender_timeout=1.0, request_timeout=0.5)
            frozen = asyncio.create_task(swarm.step(2, timeout=60, allow_retries=False))
            outcomes = await asyncio.gather(*(swarm.step(number, timeout=60) for number in range(2)))
            assert asyncio.get_running_loop().time() < 6  # silence, a probe, the averages anew
            codes = {outcome.excluded[swarm.ids[2]].code for outcome in outcomes}
            assert codes <= {ExclusionCode.SILENT, ExclusionCode.NEVER_ARRIVED, ExclusionCode.UNREACHABLE}
            with pytest.raises(FencedError):
                await frozen
            assert tensors[2][0].eq(2.0).all()
            assert torch.equal(tensors[0][0], tensors[1][0])

    run_virtual(main)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_process_that_was_held_up_reads_what_has_arrived_before_it_accuses_anybody(victim):
    async def main():
        tensors = each(3, 100_000)
        plan = FaultPlan().freeze(victim, seconds=9).at_part(3)
        async with SimulatedSwarm(bandwidth=10 * MEGABIT, faults=plan) as swarm:
            averagers = await swarm.averagers(tensors, target_group_size=3, part_size_bytes=20_000)
            results = await swarm.step_all(averagers)
            assert len(plan.events) == 2  # the freeze and its end
            assert all(result.excluded == {} for result in results)
            assert all(own[0].eq(1.0).all() for own in tensors)

    run_virtual(main)
