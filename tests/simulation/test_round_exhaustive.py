"""A sample of the exhaustive simulation: peers killed at their message boundaries. All of it: ``make simulate``."""

from __future__ import annotations

import logging

import pytest

from swarmavg.reduction.snapshot import Snapshot
from swarmavg.testing import simulate
from swarmavg.testing.event_log import Failed, Finished
from swarmavg.testing.round_cases import GROUPS, PAIR_STRIDES, Kill, bound, pairs_after, parse, play, singles

SINGLES = 6
"""Kills of each group and kind, spread over all that there are."""
PAIR_FIRSTS = 5
PAIR_SECONDS = 43


@pytest.fixture(autouse=True)
def _quiet():
    """Every death is logged as a warning, which takes longer to write than to simulate."""
    logger = logging.getLogger("swarmavg")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def check(reports):
    """Each case, with its name: ``python -m swarmavg.testing.simulate replay NAME`` plays it again."""
    broken = {report.case: report.violations for report in reports if report.violations}
    assert not broken


@pytest.mark.parametrize("name", GROUPS)
def test_without_a_fault_everybody_averages_at_once_and_the_run_repeats_exactly(name):
    first, second = play(GROUPS[name]), play(GROUPS[name])
    check([first, second])
    assert first.boundaries == second.boundaries
    assert first.finished == len(GROUPS[name].roles)
    assert first.seconds < 0.5
    peers = {boundary.kill.peer for boundary in first.boundaries}
    assert peers == set(range(len(GROUPS[name].roles)))


@pytest.mark.parametrize("lossy", [False, True], ids=["killed", "lost"])
@pytest.mark.parametrize("name", GROUPS)
def test_whoever_dies_wherever_the_others_end_in_time_with_the_same_right_values(name, lossy):
    cases = list(singles(GROUPS[name], lossy=lossy))
    stride = len(cases) // SINGLES
    check(play(GROUPS[name], kills) for kills in cases[stride // 2 * lossy :: stride])


@pytest.mark.parametrize("name", PAIR_STRIDES)
def test_whichever_two_die_wherever_the_others_end_in_time_with_the_same_right_values(name):
    group = GROUPS[name]
    firsts = [boundary.kill for boundary in play(group).boundaries if boundary.protocol]
    check(
        play(group, pair)
        for first in firsts[:: len(firsts) // PAIR_FIRSTS]
        for pair in pairs_after(group, first, stride=PAIR_SECONDS)
    )


# ---- the simulation itself


def test_cases_are_written_and_read():
    case = "mixed4 1b17 0r9!"
    group, kills = parse(case)
    assert group is GROUPS["mixed4"]
    assert kills == [Kill(1, "b", 17), Kill(0, "r", 9, lossy=True)]
    assert " ".join([group.name, *map(str, kills)]) == case


@pytest.mark.parametrize("case", ["nodes99", "nodes4 1x17", "nodes4 b17", "nodes4 1b17?"])
def test_what_is_no_case_is_refused_with_its_value(case):
    with pytest.raises(ValueError, match=case.split()[-1].replace("?", r"\?")):
        parse(case)


def test_a_kill_that_is_never_reached_is_a_complaint():
    assert play(GROUPS["nodes3"], [Kill(0, "b", 9999)]).violations == ["0b9999 was never reached"]


def test_the_victim_really_dies_there():
    boundary = play(GROUPS["nodes3"]).boundaries[40].kill
    report = play(GROUPS["nodes3"], [boundary])
    assert [fault.peers for fault in report.log.faults] == [(str(boundary.peer),)]
    assert str(boundary.peer) not in {end.peer for end in report.log.ends}
    assert boundary.peer not in {passed.kill.peer for passed in report.boundaries}


def test_a_product_that_writes_nothing_is_found_out(monkeypatch):
    monkeypatch.setattr(Snapshot, "commit", lambda *_: None)
    violations = play(GROUPS["nodes3"]).violations
    assert sum("the mean over" in line for line in violations) == 3
    assert sum("differ in element" in line for line in violations) == 2


def test_a_product_that_writes_one_wrong_number_at_one_member_is_found_out(monkeypatch):
    honest = Snapshot.commit
    calls = []

    def forged(self, tensors, parts, alpha):
        honest(self, tensors, parts, alpha)
        calls.append(self)
        if len(calls) == 2:
            tensors[0][17] *= 1.0001

    monkeypatch.setattr(Snapshot, "commit", forged)
    violations = play(GROUPS["nodes3"]).violations
    assert any("element 17 is" in line for line in violations)
    assert any("differ in element 17" in line for line in violations)


def test_the_bound_leaves_every_survivor_an_attempt_more_than_there_are_deaths():
    assert bound(0) < bound(1) < bound(2)
    assert bound(2) - bound(1) == bound(0)


def test_a_case_is_replayed_on_the_command_line(capsys):
    assert simulate.main(["replay", "nodes3", "0b9999"]) == 1
    told = capsys.readouterr().out
    assert "1, step 0: Finished" in told
    assert "0b9999 was never reached" in told
    assert simulate.main(["replay", "random", "3"]) == 0


def test_jobs_cover_every_boundary_and_every_tally_counts():
    jobs = list(simulate.kill_jobs(full=True))
    listed = [case for job in jobs for case in job.cases]
    assert len(listed) == len(set(listed)) == 2 * sum(len(play(group).boundaries) for group in GROUPS.values())
    tally = simulate.run_job(simulate.Job(what="some", cases=("nodes3 0b20", "nodes3 1b20", "nodes3 0b9999")))
    assert (tally.cases, [case for case, _ in tally.failures]) == (3, ["nodes3 0b9999"])
    assert tally.finished + tally.alone == 7
    assert "nodes3" not in simulate.summary({"some": tally})
    assert "3" in simulate.summary({"some": tally}).split()


def test_survivors_of_a_pair_with_nobody_left_to_reduce_keep_their_values():
    """The only reducer dies before anything was averaged: the two clients cannot average, and say so."""
    report = play(GROUPS["clients3"], [Kill(1, "b", 3)])
    check([report])
    assert {type(end.outcome) for end in report.log.ends} == {Failed}
    assert not any(isinstance(end.outcome, Finished) for end in report.log.ends)
