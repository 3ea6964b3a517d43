"""A sample of the random simulation: swarms among mixed faults. All 2,000 seeds: ``make simulate``."""

from __future__ import annotations

import logging

import pytest

from swarmavg.testing.round_random import play_seed

SEEDS = 30


@pytest.fixture(autouse=True)
def _quiet():
    """Every death is logged as a warning, which takes longer to write than to simulate."""
    logger = logging.getLogger("swarmavg")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_among_mixed_faults_the_promise_holds_nobody_hangs_and_nothing_leaks(seed):
    report = play_seed(seed)
    assert not report.violations, report.plan


def test_a_seed_replays_exactly():
    first, second = play_seed(5), play_seed(5)
    assert [(end.peer, end.step, end.time) for end in first.log.ends] == [
        (end.peer, end.step, end.time) for end in second.log.ends
    ]
    assert first.plan == second.plan
    assert first.plan.events == second.plan.events
    for one, other in zip(first.log.ends, second.log.ends, strict=True):
        assert [array.tobytes() for array in one.values] == [array.tobytes() for array in other.values]
