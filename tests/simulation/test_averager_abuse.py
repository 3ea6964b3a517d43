"""Averagers under abuse: closing and cancelling at the worst moments, hostile tensors, times and settings."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from swarmavg import (
    AllreduceError,
    Averager,
    AveragingStage,
    ClosedError,
    ExclusionCode,
    MatchmakingError,
    Peer,
    SwarmError,
)
from swarmavg.errors import FencedError, ListenError
from swarmavg.reduction.snapshot import Snapshot
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.transport.interface import TransportLimits
from swarmavg.transport.memory import MemoryNetwork


def now():
    return asyncio.get_running_loop().time()


async def until(condition):
    """Wait, in small virtual steps, until something holds; a test that waits for ever fails by its time limit."""
    while not condition():
        await asyncio.sleep(0.001)


def test_tensors_held_at_the_commit_do_not_hold_a_step_beyond_its_timeout():
    async def main():
        each = [[torch.zeros(40_000)], [torch.ones(40_000)]]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            first, second = await swarm.averagers(each, target_group_size=2, part_size_bytes=4096)
            control = await first.step(wait=False, timeout=5.0)
            other = asyncio.create_task(second.step(timeout=5.0))
            await until(lambda: control.progress > 0.1)
            async with first.get_tensors():
                began = now()
                with pytest.raises(AllreduceError, match="not finished in time"):
                    await control
                assert now() - began <= 5.1
            await other
        assert each[0][0].eq(0).all()
        assert each[1][0].eq(0.5).all()

    run_virtual(main)


def test_a_tensor_that_changes_its_shape_fails_its_owner_alone_and_at_once():
    async def main():
        each = [[torch.full((40_000,), float(value))] for value in range(3)]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=4096)
            control = await averagers[0].step(wait=False, timeout=600.0)
            others = [asyncio.create_task(averager.step(timeout=30.0)) for averager in averagers[1:]]
            await until(lambda: control.progress > 0.1)
            each[0][0].data = torch.zeros(3)
            with pytest.raises(AllreduceError, match=r"tensors\[0\] is now \(3,\)"):
                await control
            assert now() < 10
            for task in others:
                await task
        assert each[0][0].eq(0).all()

    run_virtual(main)


def test_a_commit_that_fails_is_not_taken_for_a_success_because_it_was_cancelled(monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()
        original = Snapshot.commit

        def cancel():
            control.cancel()
            loop.call_soon(cancelled.set)

        def failing(self, tensors, parts, alpha):
            if tensors[0] is each[0][0]:
                loop.call_soon_threadsafe(cancel)
                assert cancelled.wait(30)
                raise RuntimeError("no memory")
            original(self, tensors, parts, alpha)

        monkeypatch.setattr(Snapshot, "commit", failing)
        each = [[torch.zeros(400_000)], [torch.ones(400_000)]]  # too large to be committed inside the loop
        async with SimulatedSwarm(latency=0.0) as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            control = await first.step(wait=False, timeout=20.0)
            other = asyncio.create_task(second.step(timeout=20.0))
            with pytest.raises(AllreduceError, match="no memory"):
                await control
            await other

    asyncio.run(main())


def test_tensors_that_share_elements_are_refused_and_disjoint_columns_are_not():
    async def main():
        base = torch.zeros(6, 10)
        line = torch.zeros(20)
        async with SimulatedSwarm() as swarm:
            peer = await swarm.peer()
            for tensors, words in [
                ([line, line], r"tensors\[1\] shares memory"),
                ([line, torch.zeros(3), line[5:8]], r"tensors\[2\] shares memory"),
                ([base, base.t()[2:4]], r"tensors\[1\] shares memory"),
                ([base[:, ::2], base[:, 4:5]], r"tensors\[1\] shares memory"),
                ([line, line.view(torch.float64)], r"tensors\[1\] shares memory"),
                ([line.unfold(0, 5, 2)], r"tensors\[0\] is an expanded view"),
                ([torch.zeros(1).expand(4)], r"tensors\[0\] is an expanded view"),
            ]:
                with pytest.raises(ValueError, match=words):
                    Averager(tensors, peer=peer, prefix="run")
            Averager([base[:, ::2], base[:, 1::2], line[:5], line[5:], line[:0]], peer=peer, prefix="run")
            Averager([torch.zeros(4, 5, 6).permute(2, 0, 1), torch.zeros(1).expand(1)], peer=peer, prefix="run")

    run_virtual(main)


def test_neither_a_default_device_nor_inference_mode_of_the_application_matters():
    async def main():
        each = [[torch.full((100,), value, device="cpu")] for value in (0.0, 2.0)]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=2)
            with torch.inference_mode():
                await swarm.step_all(averagers)
            each[0][0].fill_(0.0)
            await swarm.step_all(averagers)
        assert each[0][0].eq(0.5).all()

    torch.set_default_device("meta")
    try:
        run_virtual(main)
    finally:
        torch.set_default_device(None)


def test_allowed_numbers_that_are_none_reach_everybody_and_break_nothing():
    async def main():
        odd = [float("nan"), float("inf"), float("-inf"), 3e38]
        each = [[torch.zeros(1004)], [torch.ones(1004)]]
        each[0][0][-4:] = torch.tensor(odd)
        each[1][0][-4:] = torch.tensor([0.0, 0.0, 0.0, 0.0])
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=2, part_size_bytes=256, nonfinite="allow")
            for result in await swarm.step_all(averagers):
                assert result.excluded == {}
        for tensors in each:
            assert tensors[0][:1000].eq(0.5).all()
            assert tensors[0][-4].isnan()
            assert tensors[0][-3:].tolist() == pytest.approx([float("inf"), float("-inf"), 1.5e38])

    run_virtual(main)


# ---- closing


def test_closing_an_averager_gives_its_waiting_callers_a_closed_error():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(10)])
            steps = [asyncio.create_task(averager.step(timeout=60.0)) for _ in range(2)]
            await asyncio.sleep(1)
            await averager.aclose()
            for step in steps:
                with pytest.raises(ClosedError, match="during the step"):
                    await step

    run_virtual(main)


@pytest.mark.parametrize("of_peer", [False, True], ids=["averager", "peer"])
def test_a_close_that_is_cancelled_or_called_twice_still_closes(of_peer):
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(10)])
            step = asyncio.create_task(averager.step(timeout=60.0))
            await asyncio.sleep(1)
            target = averager.peer if of_peer else averager
            closes = [asyncio.create_task(target.aclose()) for _ in range(2)]
            await asyncio.sleep(0)
            closes[0].cancel()
            await asyncio.gather(*closes, return_exceptions=True)
            assert closes[0].cancelled()
            with pytest.raises(ClosedError):
                await step
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("run.match")]

    run_virtual(main)


async def a_round_with_a_slow_member(swarm, bandwidth, **options):
    """Three averagers in mid-round; the last one reduces nothing, and results of the first reach it slowly from now on."""
    averagers = [
        await swarm.averager(
            [torch.full((20_000,), float(value))],
            target_group_size=3,
            bandwidth=0.0 if value == 2 else 1.0,
            part_size_bytes=4096,
            **options,
        )
        for value in range(3)
    ]
    controls = [await averager.step(wait=False, timeout=100.0) for averager in averagers]
    await until(lambda: all(control.stage is AveragingStage.RUNNING_ALLREDUCE for control in controls))
    swarm.network.set_link(averagers[0].peer_id, averagers[2].peer_id, bandwidth=bandwidth)
    return averagers, controls


def test_closing_while_a_slow_member_is_served_is_bounded_and_withdraws_the_presence():
    async def main():
        async with SimulatedSwarm() as swarm:
            averagers, controls = await a_round_with_a_slow_member(swarm, 1e3, shutdown_timeout=3.0)
            await controls[0]
            assert not controls[2].done()
            began = now()
            await averagers[0].aclose()
            assert 1.0 <= now() - began <= 3.0
            present = {record.owner for record in await averagers[1].peer.directory.fetch("run.match")}
            assert averagers[0].peer_id not in present
            assert averagers[0].peer_id in (await controls[2]).excluded

    run_virtual(main)


def test_members_on_slow_links_are_served_for_as_long_as_they_take_results():
    async def main():
        async with SimulatedSwarm() as swarm:
            averagers, controls = await a_round_with_a_slow_member(swarm, 4e3, sender_timeout=2.0, reducer_timeout=3.0)
            await controls[0]
            served = now()
            for control in controls:
                result = await control
                assert result.fraction == 1.0
                assert result.excluded == {}
            assert now() - served > 6.0  # twice its timeout: it keeps saying that it waits
            for averager in averagers:
                async with averager.get_tensors() as (tensor,):
                    assert tensor.eq(1.0).all()

    run_virtual(main)


# ---- life of a peer, and event loops


def memory_peer(network, port=1):
    return Peer(listen=[f"memory://host:{port}"], transports={"memory": network.transport})


def test_a_peer_started_twice_at_once_starts_once():
    async def main():
        async with memory_peer(MemoryNetwork()) as peer:
            assert len(peer.addresses) == 1
        peer = memory_peer(MemoryNetwork())
        await asyncio.gather(peer.start(), peer.start(), peer.start())
        assert len(peer.addresses) == 1
        await peer.aclose()
        with pytest.raises(ClosedError):
            await peer.start()

    asyncio.run(main())  # threads read keys and tokens, so that the starts overlap


def test_a_peer_whose_start_failed_can_be_started_again_and_one_closed_while_it_starts_leaks_nothing():
    async def main():
        network = MemoryNetwork()
        async with memory_peer(network):
            second = memory_peer(network)
            with pytest.raises(ListenError):
                await second.start()
        await second.start()
        assert len(second.addresses) == 1
        await second.aclose()
        third = memory_peer(network)
        starting = asyncio.create_task(third.start())
        await asyncio.sleep(0)
        await third.aclose()
        await asyncio.gather(starting, return_exceptions=True)
        assert not third.running

    run_virtual(main)


def test_objects_made_outside_an_event_loop_work_in_one_and_only_in_one():
    peer = memory_peer(MemoryNetwork())
    averager = Averager([torch.zeros(3)], peer=peer, prefix="run", min_matchmaking_time=0.2, request_timeout=0.1)

    async def first():
        await peer.start()
        await averager.start()
        with pytest.raises(MatchmakingError):
            await averager.step(timeout=0.3)

    async def second():
        for use in (averager.step, averager.start, peer.start):
            with pytest.raises(ClosedError, match="another event loop"):
                await use()
        await averager.aclose()
        await peer.aclose()
        with pytest.raises(ClosedError, match="is closed"):
            await averager.step()

    asyncio.run(first())
    asyncio.run(second())


# ---- hostile settings and messages


def test_a_member_that_is_less_patient_than_the_others_hears_enough_of_them():
    async def main():
        each = [[torch.zeros(100)], [torch.ones(100)]]
        async with SimulatedSwarm() as swarm:
            hasty = await swarm.averager(each[0], target_group_size=2, sender_timeout=1.5)
            calm = await swarm.averager(each[1], target_group_size=2)
            control = await calm.step(wait=False, require_trigger=True)
            step = asyncio.create_task(hasty.step(allow_retries=False))
            await asyncio.sleep(60)
            control.allow_allreduce()
            assert (await step).excluded == {}
            await control

    run_virtual(main)


def test_tiny_timeouts_fail_in_time_and_do_not_stop_the_clock():
    async def main():
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(
                [[torch.zeros(100)], [torch.ones(100)]], target_group_size=2, sender_timeout=1e-12, allreduce_timeout=0.5
            )
            outcomes = await asyncio.gather(*(averager.step(timeout=3.0) for averager in averagers), return_exceptions=True)
            assert all(isinstance(outcome, SwarmError) for outcome in outcomes)
            assert now() < 3.5

    run_virtual(main)


@pytest.mark.parametrize(
    "settings",
    [{"bandwidth": 10**400}, {"request_timeout": 10**400}, {"averaging_alpha": 10**400}, {"min_matchmaking_time": 10**400}],
    ids=lambda settings: next(iter(settings)),
)
def test_numbers_that_no_float_holds_are_refused_by_name(settings):
    async def main():
        async with SimulatedSwarm() as swarm:
            peer = await swarm.peer()
            with pytest.raises(ValueError, match=next(iter(settings))):
                Averager([torch.zeros(3)], peer=peer, prefix="run", **settings)

    run_virtual(main)


def test_arguments_of_a_step_that_cannot_be_sent_are_refused_by_name():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(3)])
            with pytest.raises(ValueError, match=r"gather=.*cannot be packed"):
                await averager.step(gather="\ud800")
            with pytest.raises(ValueError, match="weight"):
                await averager.step(weight=10**400)
            with pytest.raises(ValueError, match="timeout"):
                await averager.step(timeout=10**400)

    run_virtual(main)


def test_parts_that_a_peer_does_not_accept_are_refused_at_construction_or_blamed_on_that_peer():
    async def main():
        async with SimulatedSwarm() as swarm:
            peer = await swarm.peer(limits=TransportLimits(message_bytes=3000))
            with pytest.raises(ValueError, match="message_bytes=3000"):
                Averager([torch.zeros(10_000)], peer=peer, prefix="run")
            small = Averager([torch.zeros(1000)], peer=peer, prefix="run", part_size_bytes=2000, target_group_size=2)
            async with small:
                exact = await swarm.averager([torch.ones(1000)], part_size_bytes=2000, target_group_size=2)
                await swarm.step_all([small, exact])
                peer._limits = TransportLimits()  # past the check: such a peer may run other software
                each = [[torch.zeros(10_000)], [torch.ones(10_000)]]
                async with Averager(each[0], peer=peer, prefix="large", target_group_size=2) as narrow:
                    wide = await swarm.averager(each[1], prefix="large", target_group_size=2)
                    steps = [await averager.step(timeout=4.0, wait=False) for averager in (narrow, wide)]
                    exclusion = (await steps[1]).excluded[narrow.peer_id]
                    assert exclusion.code is ExclusionCode.REFUSED
                    assert "at most 3000" in exclusion.detail

    run_virtual(main)


def test_a_member_that_leaves_before_the_round_is_opened_here_is_not_waited_for():
    async def main():
        each = [[torch.full((100,), float(value))] for value in range(3)]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3)
            matchmaker: Any = averagers[0]._matchmaker
            desk: Any = averagers[0]._desk
            find_group = matchmaker.find_group

            async def found_after_one_has_left(request):
                group = await find_group(request)
                desk.member_left(group.group_id, averagers[2].peer_id, "gone")
                return group

            matchmaker.find_group = found_after_one_has_left
            steps = [asyncio.create_task(averager.step(allow_retries=False)) for averager in averagers]
            results = [await step for step in steps[:2]]
            assert now() < 2.0
            for result in results:
                assert result.excluded[averagers[2].peer_id].code is ExclusionCode.CANCELLED
            with pytest.raises(FencedError):
                await steps[2]

    run_virtual(main)


def test_the_reason_why_a_group_failed_is_kept_when_no_other_is_found():
    async def main():
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers([[torch.zeros(100)], [torch.ones(100)]], target_group_size=2)
            doomed = await averagers[1].step(wait=False, require_trigger=True)
            control = await averagers[0].step(wait=False, timeout=20)
            await until(lambda: control.stage is AveragingStage.RUNNING_ALLREDUCE)
            swarm.network.kill(averagers[1].peer_id)
            with pytest.raises(MatchmakingError) as caught:
                await control
            assert isinstance(caught.value.__cause__, AllreduceError)
            doomed.cancel()

    run_virtual(main)


# ---- what is left behind


def test_many_rounds_leave_nothing_behind_even_if_every_control_is_kept():
    async def main():
        each = [[torch.zeros(2000)], [torch.ones(2000)]]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=2)
            desk: Any = averagers[0]._desk
            rounds: Any = averagers[0]._round
            kept, exchanges = [], []
            for _ in range(50):
                controls = [await averager.step(wait=False) for averager in averagers]
                await until(lambda: desk._exchanges)
                exchanges += [weakref.ref(exchange) for exchange in desk._exchanges.values()]
                for control in controls:
                    await control
                kept += controls
            await asyncio.sleep(1)
            gc.collect()
            assert len(exchanges) >= 50
            assert [exchange for exchange in exchanges if exchange() is not None] == []
            assert not desk._exchanges
            assert not rounds._serving
            assert all(control.progress == 1.0 for control in kept)

    run_virtual(main)
