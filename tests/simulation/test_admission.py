"""Values that are not finite: whose step fails, who is dropped, and what is averaged all the same."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch

from swarmavg import AllreduceError, MatchmakingError, StepResult, SwarmError
from swarmavg.averaging_round import OwnFailureError
from swarmavg.compression import Float16Compression, NoCompression
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm

SIZE = 2000
VALUES = (1.0, 2.0, 6.0)
"""The mean of any two or three of them is a number that float32 and float16 hold exactly, and another for each choice."""
BAD = [math.nan, math.inf, -math.inf]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _everything_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="swarmavg")


def tensors_of(dtype=torch.float32):
    return [[torch.full((SIZE,), value, dtype=dtype)] for value in VALUES]


def check_values(averagers, each, results, weights=(1.0, 1.0, 1.0)):
    """All results are whole and hold the weighted mean over whom they name; those who share a list hold the same bits."""
    ids = [averager.peer_id for averager in averagers]
    for own, result in results.items():
        assert result.fraction == 1.0
        assert not result.diverged
        assert result.contributors[0][0].start == 0
        for span, members in result.contributors:
            who = [ids.index(member) for member in members]
            expected = sum(weights[p] * VALUES[p] for p in who) / sum(weights[p] for p in who)
            assert each[own][0][span.start : span.stop].eq(torch.tensor(expected, dtype=each[own][0].dtype)).all()
    first = next(iter(results))
    for own, result in results.items():
        assert result.contributors == results[first].contributors
        assert torch.equal(each[own][0], each[first][0])


def results_of(outcomes) -> list[StepResult]:
    assert all(isinstance(outcome, StepResult) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, StepResult)]


def refusals_of(offender, caplog) -> str:
    """What the logs of the others say of channels that they ended because the offender broke the rules."""
    words = rf"channel of the round failed peer={offender.peer_id.short} .*(?:reason=protocol-violation|RemoteProtocolError).*"
    return "\n".join(re.findall(words, caplog.text))


def dropped_somewhere(result, offender):
    return any(offender.peer_id not in members for _, members in result.contributors)


# ---- values: the own ones


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
def test_own_values_that_are_not_finite_fail_the_own_step_before_anything_is_sent(dtype, bad):
    async def main():
        each = tensors_of(dtype)
        each[2][0][1234] = bad
        before = each[2][0].clone()
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256, nonfinite="reject")
            watch = swarm.messages
            watch.on_sending.append(said.append)
            outcomes = await swarm.step_each(averagers, timeout=60)
            assert isinstance(outcomes[2], OwnFailureError)
            assert isinstance(outcomes[2], AllreduceError)
            message = str(outcomes[2])
            assert f"tensors[0] (key '0') holds 1 of {SIZE} values that are NaN or infinite" in message
            assert f"the first is {bad} at element 1234" in message
            assert not [seen for seen in said if seen.source == averagers[2].peer_id and seen.content in ("part", "start")]
            results = results_of(outcomes[:2])
            check_values(averagers, each, dict(enumerate(results)))
            for result in results:
                assert not dropped_somewhere(result, averagers[0])
                assert not dropped_somewhere(result, averagers[1])
                assert not any(averagers[2].peer_id in members for _, members in result.contributors)
        assert torch.equal(each[2][0].nan_to_num(), before.nan_to_num())

    said: list[Any] = []
    run_virtual(main)


def test_a_step_of_weight_0_sends_nothing_and_so_may_have_anything_to_get_rid_of():
    async def main():
        each = tensors_of()
        each[2][0].fill_(math.nan)
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256)
            results = await swarm.step_all(averagers, weights=[1.0, 3.0, 0.0])
            check_values(averagers, each, dict(enumerate(results)), weights=(1.0, 3.0, 0.0))
            assert all(result.excluded == {} for result in results)

    run_virtual(main)


def test_who_allows_them_does_not_meet_who_rejects_them_and_is_told_why():
    async def main():
        each = tensors_of()[:2]
        async with SimulatedSwarm() as swarm:
            rejecting = await swarm.averager(each[0], target_group_size=2)
            allowing = await swarm.averager(each[1], target_group_size=2, nonfinite="allow")
            outcomes = await swarm.step_each([rejecting, allowing], timeout=10)
            assert all(isinstance(outcome, MatchmakingError) for outcome in outcomes)
            assert "nonfinite" in str(outcomes[0])

    run_virtual(main)


# ---- values: those of others


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("places", [[0], [1999], [700, 1300]], ids=str)
def test_a_contributor_that_sends_values_that_are_not_finite_is_dropped_alone(dtype, codec, places, caplog):
    async def main():
        each = tensors_of(dtype)
        each[2][0][places] = math.nan
        async with SimulatedSwarm() as swarm:
            settings = {"target_group_size": 3, "part_size_bytes": 256, "compression": codec}
            averagers = await swarm.averagers(each, roles=["node", "node", "client"], **settings)
            object.__setattr__(averagers[2].config, "nonfinite", "allow")  # other software than ours
            outcomes = await swarm.step_each(averagers, timeout=60)
            assert isinstance(outcomes[2], StepResult | SwarmError)
            results = results_of(outcomes[:2])
            check_values(averagers, each, dict(enumerate(results)))
            assert "holds NaN or infinite values" in refusals_of(averagers[2], caplog)
            for result in results:
                assert set(result.excluded) <= {averagers[2].peer_id}
                lists = [
                    members
                    for span, members in result.contributors
                    for place in places
                    if place in range(span.start, span.stop)
                ]
                assert lists
                assert not any(averagers[2].peer_id in members for members in lists)

    run_virtual(main)


def test_allowed_values_that_are_not_finite_are_averaged_and_nobody_is_dropped():
    async def main():
        each = tensors_of()
        each[2][0][700] = math.nan
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256, nonfinite="allow")
            results = await swarm.step_all(averagers)
            assert all(result.excluded == {} for result in results)
            for tensors in each:
                assert tensors[0].isnan().nonzero().tolist() == [[700]]
                assert tensors[0].nan_to_num(3.0).eq(3.0).all()

    run_virtual(main)


def test_finite_values_that_overflow_in_the_sum_are_infinite_for_all_and_fail_the_next_step_of_each():
    async def main():
        each = [[torch.full((SIZE,), 1.0)] for _ in range(3)]
        for tensors in each:
            tensors[0][5] = 3e38
        async with SimulatedSwarm() as swarm:
            averagers = await swarm.averagers(each, target_group_size=3, part_size_bytes=256)
            for result in await swarm.step_all(averagers):
                assert result.excluded == {}
                assert result.fraction == 1.0
            for tensors in each:
                assert tensors[0][5] == math.inf
                assert tensors[0].isinf().sum() == 1
            for outcome in await swarm.step_each(averagers, timeout=10):
                assert isinstance(outcome, AllreduceError)

    run_virtual(main)
