"""Plans of faults as values: they compare, print as code, tell what they are, and refuse bad arguments."""

from __future__ import annotations

from typing import Any

import pytest

from swarmavg.testing.fault_kinds import Kill
from swarmavg.testing.faults import FaultPlan

PLANS = [
    FaultPlan(9),
    FaultPlan().kill(2).at_part(3),
    FaultPlan(7).kill(2, abrupt=True).before_message(7).freeze(1, seconds=20).after_part(1, of=0).cut(0, 1, seconds=5).at(1.5),
    FaultPlan(-1).stall(0, 1).after_receiving(4).slow(2, 0, bytes_per_second=1e3, seconds=2).at_result(1).corrupt(0),
    FaultPlan(3).corrupt(1, where="payload").after_result(2).step_clock(1, hours=-1, minutes=5).at(0).skew_clock(0, seconds=1),
    *(FaultPlan.random(seed, peers=5, faults=6) for seed in range(30)),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_repr_of_a_plan_is_code_that_makes_it(plan: FaultPlan) -> None:
    again = eval(repr(plan), {"FaultPlan": FaultPlan})
    assert again == plan
    assert hash(again) == hash(plan)
    assert repr(again) == repr(plan)
    assert len(plan.describe().splitlines()) == len(plan.faults)


def test_a_plan_tells_what_it_does() -> None:
    assert PLANS[2].describe().splitlines() == [
        "kill peer 2, losing what it has under way, when peer 2 is about to send its message 7",
        "freeze peer 1 for 20 s when part 1 of peer 0 is on its way",
        "cut peers 0 and 1 off from each other for 5 s 1.5 s after the start",
    ]
    assert PLANS[4].describe().splitlines()[1:] == [
        "step the wall clock of peer 1 by -3300 s 0 s after the start",
        "skew the clocks of peer 0 by +1 s from the start",
    ]


def test_plans_do_not_change() -> None:
    plan = FaultPlan(1).kill(0)
    longer = plan.at(3).cut(0, 1)
    assert (len(plan.faults), plan.triggers) == (1, (None,))
    assert len(longer.faults) == 2
    assert plan != longer
    assert plan != "FaultPlan(1).kill(0)"
    assert plan == FaultPlan(1).kill(0)


def test_random_plans_leave_two_peers_alone_and_differ_by_seed() -> None:
    plans = [FaultPlan.random(seed, peers=4, faults=8) for seed in range(200)]
    assert FaultPlan.random(5, peers=4, faults=8) == plans[5]
    assert len(set(plans)) == 200
    for plan in plans:
        lost = {fault.peers[0] for fault in plan.faults if fault.name in ("kill", "freeze")}
        assert len(lost) <= 2
        assert all(max(fault.peers) < 4 for fault in plan.faults)
    assert {fault.name for plan in plans for fault in plan.faults} == {
        "kill", "freeze", "cut", "stall", "slow", "corrupt", "step_clock", "skew_clock",
    }  # fmt: skip
    assert not any(isinstance(fault, Kill) for fault in FaultPlan.random(1, peers=2, faults=50).faults)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.kill(-1), "peer must be .* got -1"),
        (lambda p: p.kill(True), "peer must be .* got True"),
        (lambda p: p.freeze("a"), "peer must be .* got 'a'"),
        (lambda p: p.freeze(1, seconds=0), "seconds must be .* got 0"),
        (lambda p: p.freeze(1, seconds=float("inf")), "seconds must be .* got inf"),
        (lambda p: p.cut(1, 1), "a=1 and b=1"),
        (lambda p: p.stall(0, 1.5), "b must be .* got 1.5"),
        (lambda p: p.stall(0, 1, seconds=float("nan")), "seconds must be .* got nan"),
        (lambda p: p.slow(0, 1, bytes_per_second=0), "bytes_per_second must be .* got 0"),
        (lambda p: p.corrupt(0, where="tail"), "where must be .* got 'tail'"),
        (lambda p: p.step_clock(0), "got 0.0 seconds"),
        (lambda p: p.step_clock(0, hours="1"), "hours must be .* got '1'"),
        (lambda p: p.skew_clock(0, hours=-1), "got -3600.0 seconds"),
        (lambda p: p.kill(0).at(-1), "seconds must be .* got -1"),
        (lambda p: p.kill(0).at_message(0), "number must be .* got 0"),
        (lambda p: p.kill(0).at_part(1.5), "number must be .* got 1.5"),
        (lambda p: p.kill(0).at_part(1, of=-2), "of must be .* got -2"),
        (lambda p: p.at(1), r"at\(1\) needs a fault"),
        (lambda p: p.kill(0).at(1).at(2), r"kill\(0\) has a moment already, at\(1\), got at\(2\)"),
        (lambda p: p.skew_clock(0, hours=1).at(2), "takes no moment"),
        (lambda _: FaultPlan("x"), "seed must be .* got 'x'"),  # type: ignore[arg-type]
        (lambda _: FaultPlan.random(1, peers=1), "peers must be .* got 1"),
        (lambda _: FaultPlan.random(1, peers=3, faults=-1), "faults must be .* got -1"),
        (lambda _: FaultPlan.random(1, peers=3, seconds=-1), "seconds must be .* got -1"),
    ],
)
def test_bad_arguments_are_named_with_their_value(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(FaultPlan())
