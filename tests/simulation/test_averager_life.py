"""Steps of real averagers in virtual time: triggers, cancellation, timeouts, retries, losses. Tensors never half-change."""

from __future__ import annotations

import asyncio
import gc
import logging
import math

import pytest
import torch

from swarmavg import (
    AllreduceError,
    Averager,
    AveragingStage,
    ClosedError,
    ExclusionCode,
    MatchmakingError,
    StepControl,
    SwarmError,
)
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm


def now():
    return asyncio.get_running_loop().time()


async def until(condition):
    """Wait, in small virtual steps, until something holds; a test that waits for ever fails by its time limit."""
    while not condition():
        await asyncio.sleep(0.001)


def test_a_lone_peer_fails_in_time_says_who_was_seen_and_keeps_its_tensors():
    async def main():
        tensor = torch.ones(5)
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([tensor], initial_group_bits="0", target_group_size=2)
            other = await swarm.averager([torch.zeros(6)], initial_group_bits="0", target_group_size=2)
            began = now()
            with pytest.raises(MatchmakingError) as caught:
                await averager.step(timeout=7.0)
            assert 6.9 <= now() - began <= 7.1
            assert other.peer_id in caught.value.seen
            assert "shapes" in str(caught.value)
        assert tensor.eq(1).all()

    run_virtual(main)


def test_without_a_timeout_three_windows_are_the_limit():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.ones(5)], min_matchmaking_time=4.0)
            began = now()
            with pytest.raises(MatchmakingError, match="nobody"):
                await averager.step()
            assert 11.9 <= now() - began <= 12.1

    run_virtual(main)


def test_the_trigger_holds_the_all_reduce_and_the_weight_may_change_until_then():
    async def main():
        each = [[torch.full((300,), value)] for value in (0.0, 4.0)]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            control = await first.step(wait=False, require_trigger=True)
            assert isinstance(control, StepControl)
            other = asyncio.create_task(second.step())
            await until(lambda: control.stage is AveragingStage.AWAITING_TRIGGER)
            await asyncio.sleep(100)  # longer than any silence that is allowed: heartbeats say that it lives
            assert not other.done()
            assert not control.triggered
            assert not control.began_allreduce
            assert control.progress == 0.0
            control.weight = 3.0
            with pytest.raises(ValueError, match="weight"):
                control.weight = -1.0
            control.allow_allreduce()
            with pytest.warns(UserWarning, match="triggered before"):
                control.allow_allreduce()
            result = await control
            assert await other == result or (await other).round_id == result.round_id
            assert control.done()
            assert control.stage is AveragingStage.FINISHED
            assert control.progress == 1.0
            with pytest.warns(UserWarning, match="no effect"):
                control.weight = 1.0
        assert each[0][0].eq(1.0).all()
        assert each[1][0].eq(1.0).all()

    run_virtual(main)


def test_scheduled_time_delays_the_round_and_may_be_moved():
    async def main():
        each = [[torch.zeros(10)], [torch.ones(10)]]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            began = now()
            control = await first.step(wait=False, scheduled_time=began + 3.0)
            other = asyncio.create_task(second.step())
            await asyncio.sleep(1.0)
            assert control.scheduled_time == began + 3.0
            control.scheduled_time = began + 4.0
            await until(lambda: control.stage is AveragingStage.AWAITING_TRIGGER)
            assert 3.0 <= now() - began < 3.5
            await control
            await other
            assert 4.0 <= now() - began < 4.5
            with pytest.raises(ValueError, match="scheduled_time"):
                await first.step(timeout=5.0, scheduled_time=now() + 5.0)
            with pytest.raises(ValueError, match="over a year"):
                await first.step(scheduled_time=1.8e9)

    run_virtual(main)


@pytest.mark.parametrize(
    "stage", [AveragingStage.LOOKING_FOR_GROUP, AveragingStage.AWAITING_TRIGGER, AveragingStage.RUNNING_ALLREDUCE]
)
def test_a_step_cancelled_in_any_stage_changes_nothing_and_hangs_nobody(stage):
    async def main():
        each = [[torch.full((40_000,), float(value))] for value in range(3)]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=4096)
            control = await averagers[0].step(wait=False, require_trigger=stage is not AveragingStage.RUNNING_ALLREDUCE)
            if stage is AveragingStage.LOOKING_FOR_GROUP:
                await until(lambda: control.stage is stage)
                control.cancel()
            others = [asyncio.create_task(averager.step(timeout=30)) for averager in averagers[1:]]
            if stage is not AveragingStage.LOOKING_FOR_GROUP:
                await until(lambda: control.stage is stage)
                if stage is AveragingStage.RUNNING_ALLREDUCE:
                    await until(lambda: control.progress > 0.2)
                control.cancel()
            began = now()
            outcomes = await asyncio.gather(*others, return_exceptions=True)
            assert now() - began < 25
            with pytest.raises(asyncio.CancelledError):
                await control
            assert control.cancelled()
            assert each[0][0].eq(0.0).all()
            for outcome in outcomes:
                assert not isinstance(outcome, BaseException) or isinstance(outcome, SwarmError)
            assert not all(isinstance(outcome, BaseException) for outcome in outcomes)
            # the averager lives on
            for index, tensors in enumerate(each):
                tensors[0].fill_(float(index))
            await swarm.step_all(averagers)
            assert all(tensors[0].eq(1.0).all() for tensors in each)

    run_virtual(main)


def test_the_deadline_bounds_the_whole_call():
    async def main():
        each = [[torch.full((1000,), float(value))] for value in range(2)]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            control = await second.step(wait=False, require_trigger=True, timeout=60)
            began = now()
            with pytest.raises((AllreduceError, MatchmakingError)):
                await first.step(timeout=8.0)
            assert 7.9 <= now() - began <= 8.2
            control.cancel()
        assert each[0][0].eq(0.0).all()
        assert each[1][0].eq(1.0).all()

    run_virtual(main)


def test_allreduce_timeout_bounds_a_round_and_says_who_is_awaited():
    async def main():
        each = [[torch.full((1000,), float(value))] for value in range(2)]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2, allreduce_timeout=2.0)
            control = await second.step(wait=False, require_trigger=True, timeout=60)
            with pytest.raises(AllreduceError, match=f"waiting for {second.peer_id.short}"):
                await first.step(allow_retries=False)
            control.cancel()
        assert each[0][0].eq(0.0).all()

    run_virtual(main)


def test_a_peer_that_dies_in_mid_round_is_excluded_with_a_reason(caplog):
    async def main():
        each = [[torch.full((40_000,), float(value))] for value in range(4)]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            averagers = await swarm.averagers(each, target_group_size=4, part_size_bytes=4096)
            dead = averagers[3]
            doomed = await dead.step(wait=False)
            steps = [await averager.step(wait=False) for averager in averagers[:3]]
            await until(lambda: min(step.progress for step in steps) > 0.1)
            swarm.network.kill(dead.peer_id)
            results = [await step for step in steps]
            doomed.cancel()
            ids = [averager.peer_id for averager in averagers]
            for result, tensors in zip(results, each, strict=False):
                assert result.excluded[dead.peer_id].code in {ExclusionCode.CONNECTION_LOST, ExclusionCode.UNREACHABLE}
                assert result.fraction == 1.0
                assert result.contributors == results[0].contributors
                assert torch.equal(tensors[0], each[0][0])
                for span, members in result.contributors:
                    expected = sum(float(ids.index(member)) for member in members) / len(members)
                    torch.testing.assert_close(tensors[0][span.start : span.stop], torch.full((len(span),), expected))

    with caplog.at_level(logging.WARNING, logger="swarmavg.round"):
        run_virtual(main)
    assert any("peer excluded from the round" in record.message for record in caplog.records)


def test_a_frozen_peer_is_excluded_after_its_silence():
    async def main():
        each = [[torch.full((40_000,), float(value))] for value in range(3)]
        async with SimulatedSwarm(bandwidth=1e6) as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=4096, sender_timeout=2.0)
            frozen = averagers[2]
            doomed = await frozen.step(wait=False, timeout=60)
            steps = [await averager.step(wait=False) for averager in averagers[:2]]
            await until(lambda: min(step.progress for step in steps) > 0.1)
            for averager in averagers[:2]:
                swarm.network.cut(frozen.peer_id, averager.peer_id)
            began = now()
            results = [await step for step in steps]
            assert now() - began < 10
            for result in results:
                assert result.excluded[frozen.peer_id].code is ExclusionCode.SILENT
            doomed.cancel()
            for averager in averagers[:2]:
                swarm.network.heal(frozen.peer_id, averager.peer_id)

    run_virtual(main)


def test_two_members_one_of_which_dies_at_once_fail_and_retry_until_the_deadline():
    async def main():
        each = [[torch.full((100,), float(value))] for value in range(2)]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            doomed = await second.step(wait=False, require_trigger=True)
            control = await first.step(wait=False, timeout=20)
            await until(lambda: control.stage is AveragingStage.RUNNING_ALLREDUCE)
            swarm.network.kill(second.peer_id)
            with pytest.raises((AllreduceError, MatchmakingError)):
                await control
            doomed.cancel()
        assert each[0][0].eq(0.0).all()

    run_virtual(main)


def test_steps_called_at_once_queue_up_in_order():
    async def main():
        each = [[torch.zeros(10)], [torch.ones(10)]]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            mine = [await first.step(gather=number, wait=False) for number in range(3)]
            theirs = [await second.step(gather=number, wait=False) for number in range(3)]
            for number in range(3):
                assert set((await mine[number]).values()) == {number}
                await theirs[number]

    run_virtual(main)


def test_tensors_are_neither_read_nor_written_while_the_user_holds_them():
    async def main():
        each = [[torch.zeros(10)], [torch.full((10,), 2.0)]]
        async with SimulatedSwarm() as swarm:
            first, second = await swarm.averagers(each, target_group_size=2)
            async with first.get_tensors() as (tensor,):
                steps = asyncio.gather(first.step(), second.step())
                await asyncio.sleep(3)
                assert tensor.eq(0).all()
                tensor.fill_(6.0)
            await steps
        assert each[0][0].eq(4.0).all()
        assert each[1][0].eq(4.0).all()

    run_virtual(main)


def test_closing_cancels_pending_steps_and_a_second_close_does_nothing():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(10)])
            control = await averager.step(wait=False, timeout=math.inf)
            await asyncio.sleep(1)
            began = now()
            await averager.aclose()
            await averager.aclose()
            assert now() - began <= averager.config.shutdown_timeout
            assert control.cancelled()
            with pytest.raises(ClosedError):
                await averager.step()
            with pytest.raises(ClosedError):
                await averager.start()

    run_virtual(main)


def test_an_averager_must_be_started_and_a_prefix_used_once():
    async def main():
        async with SimulatedSwarm() as swarm:
            peer = await swarm.peer()
            averager = Averager([torch.zeros(3)], peer=peer, prefix="run")
            with pytest.raises(ClosedError, match="not been started"):
                await averager.step()
            async with averager:
                with pytest.raises(ValueError, match="has an averager"):
                    await Averager([torch.zeros(3)], peer=peer, prefix="run").start()
                async with Averager([torch.zeros(3)], peer=peer, prefix="another"):
                    pass

    run_virtual(main)


def test_an_untriggered_control_that_is_dropped_warns():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(10)])
            control = await averager.step(wait=False, require_trigger=True)
            with pytest.warns(ResourceWarning, match="allow_allreduce"):
                del control
                gc.collect()

    run_virtual(main)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weight": -1.0}, ValueError, "weight.*-1.0"),
        ({"weight": math.nan}, ValueError, "weight.*nan"),
        ({"weight": math.inf}, ValueError, "weight.*inf"),
        ({"weight": 1e300}, ValueError, "weight.*1e.300"),
        ({"weight": "1"}, TypeError, "weight.*'1'"),
        ({"timeout": 0}, ValueError, "timeout.*0"),
        ({"timeout": math.nan}, ValueError, "timeout.*nan"),
        ({"timeout": "5"}, TypeError, "timeout.*'5'"),
        ({"require_trigger": True}, ValueError, "require_trigger=True needs wait=False"),
        ({"gather": object()}, TypeError, "gather"),
        ({"gather": {1: 2}}, ValueError, "gather"),
        ({"gather": b"x" * 100_000}, ValueError, "gather packs to"),
        ({"gather": 1 << 70}, ValueError, "gather"),
    ],
    ids=str,
)
def test_bad_arguments_of_step(arguments, error, words):
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(10)])
            with pytest.raises(error, match=words):
                await averager.step(**arguments)

    run_virtual(main)


def test_group_bits_move_on_and_bring_everyone_to_the_global_mean():
    async def main():
        each = [[torch.full((50,), float(2**index))] for index in range(8)]
        mean = sum(2.0**index for index in range(8)) / 8
        async with SimulatedSwarm() as swarm:
            averagers = [
                await swarm.averager(tensors, target_group_size=2, initial_group_bits=format(index // 2, "02b"))
                for index, tensors in enumerate(each)
            ]
            for _ in range(3):
                results = await swarm.step_all(averagers)
                assert all(result.group_size == 2 for result in results)
                total = sum(tensors[0][0].item() for tensors in each)
                assert total == pytest.approx(8 * mean, rel=1e-6)
        for tensors in each:
            torch.testing.assert_close(tensors[0], torch.full((50,), mean), rtol=1e-6, atol=1e-6)

    run_virtual(main)


def test_bits_set_by_the_user_are_checked_and_used():
    async def main():
        async with SimulatedSwarm() as swarm:
            averager = await swarm.averager([torch.zeros(3)], initial_group_bits="01", target_group_size=2)
            assert averager.get_group_bits() == "01"
            averager.set_group_bits("10")
            assert averager.get_group_bits() == "10"
            with pytest.raises(ValueError, match="'2'"):
                averager.set_group_bits("2")

    run_virtual(main)


def test_a_member_that_leaves_before_it_opens_a_channel_is_not_waited_for():
    async def main():
        each = [[torch.full((100,), float(value))] for value in range(3)]
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3)
            leaver = await averagers[2].step(wait=False)
            steps = [await averager.step(wait=False) for averager in averagers[:2]]
            await until(lambda: leaver.stage in {AveragingStage.AWAITING_TRIGGER, AveragingStage.RUNNING_ALLREDUCE})
            leaver.cancel()
            began = now()
            results = [await step for step in steps]
            assert now() - began < 3
            for result in results:
                assert result.excluded[averagers[2].peer_id].code is ExclusionCode.CANCELLED

    run_virtual(main)
