"""The oracle itself: it accepts what is right, and catches every way of being wrong that it is there for."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmavg.compression import Float16Compression
from swarmavg.testing import event_log, oracle, oracle_values, troubles
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.event_log import EventLog, Failed, FaultApplied, Finished, StepEnded, StepStarted
from swarmavg.testing.network import RoleName, SimulatedSwarm
from swarmavg.testing.round_recorder import Recorder

ROLES = {"ann": "node", "bob": "node", "cid": "client", "dot": "auxiliary", "eve": "node"}
WEIGHTS = {"ann": 1.0, "bob": 2.5, "cid": 0.0, "dot": 0.0, "eve": 1.0}
EARLY, LATE = frozenset({"ann", "bob", "eve"}), frozenset({"ann", "bob"})
TOTAL, BORDER = 30, 12


def values_of(seed):
    numbers = np.random.default_rng(seed)
    return (numbers.standard_normal(20).astype(np.float32), numbers.standard_normal((2, 5)))


def averaged(inputs, own, alpha):
    """What the five of them come to: Eve died when she had delivered the first 12 elements."""
    flat = {name: np.concatenate([array.reshape(-1) for array in values]) for name, values in inputs.items()}
    mean = np.zeros(TOTAL)
    for where, names in ((slice(0, BORDER), EARLY), (slice(BORDER, TOTAL), LATE)):
        total = sum(WEIGHTS[name] for name in names)
        mean[where] = sum(WEIGHTS[name] * flat[name][where] for name in sorted(names)) / total
    mixed = mean if alpha == 1.0 else flat[own] + alpha * (mean - flat[own])
    return (mixed[:20].astype(np.float32), mixed[20:].reshape(2, 5))


def good_log(alpha=1.0):
    inputs = {name: values_of(seed) for seed, name in enumerate(ROLES)}
    result = Finished(
        round_id="first",
        members=dict.fromkeys(ROLES, 7),
        spans=((0, BORDER, EARLY), (BORDER, TOTAL, LATE)),
        missing=(),
        fraction=1.0,
        excluded=frozenset({"eve"}),
        diverged=False,
    )
    log = EventLog(patience=0.5, grouping=3.0, faults=[FaultApplied(kind="kill", peers=("eve",), time=0.3)])
    for name, role in ROLES.items():
        log.starts.append(
            StepStarted(
                peer=name,
                step=7,
                time=0.0,
                role=role,
                weight=WEIGHTS[name],
                alpha=alpha,
                values=inputs[name],
                deadline=5.0,
            )
        )
        if name != "eve":
            after = inputs[name] if role == "auxiliary" else averaged(inputs, name, alpha)
            log.ends.append(StepEnded(peer=name, step=7, time=0.5, outcome=result, values=after))
    return log


# ---- how a log can be changed


def change_end(log, name, **fields):
    index = next(index for index, end in enumerate(log.ends) if end.peer == name)
    log.ends[index] = replace(log.ends[index], **fields)


def change_start(log, name, **fields):
    index = next(index for index, start in enumerate(log.starts) if start.peer == name)
    log.starts[index] = replace(log.starts[index], **fields)


def change_result(log, *names, **fields):
    for end in list(log.ends):
        if end.peer in (names or ROLES):
            change_end(log, end.peer, outcome=replace(end.outcome, **fields))


def end_of(log, name):
    return next(end for end in log.ends if end.peer == name)


def start_of(log, name):
    return next(start for start in log.starts if start.peer == name)


def scale_element(log, at, factor, *names):
    for name in names:
        values = event_log.copied(end_of(log, name).values)
        array, index = (values[0], at) if at < 20 else (values[1], (at - 20) // 5)
        if at < 20:
            array[index] *= factor
        else:
            array[index, (at - 20) % 5] *= factor
        change_end(log, name, values=values)


def fail(log, name, error="AllreduceError", **fields):
    outcome = Failed(error=error, message="so it was")
    change_end(log, name, **{"outcome": outcome, "values": start_of(log, name).values, **fields})


def nudge_bits(log):
    values = event_log.copied(end_of(log, "bob").values)
    values[0][3] = np.nextafter(values[0][3], np.float32(9.0))
    change_end(log, "bob", values=values)


def change_auxiliary(log):
    values = event_log.copied(start_of(log, "dot").values)
    values[1][0, 0] += 1e-9
    change_end(log, "dot", values=values)


def fail_and_change(log):
    log.faults.append(FaultApplied(kind="leave", peers=("bob",), time=0.2))
    fail(log, "bob", values=end_of(log, "bob").values)


def swap_zero_signs(log):
    """Equal numbers, different bits."""
    for start in list(log.starts):
        values = event_log.copied(start.values)
        values[0][2] = 0.0
        change_start(log, start.peer, values=values)
    for end in list(log.ends):
        values = event_log.copied(end.values)
        values[0][2] = -0.0 if end.peer == "bob" else 0.0
        change_end(log, end.peer, values=values)


def lose_two(log):
    for name in ("ann", "bob"):
        fail(log, name, "MatchmakingError", time=4.9)
    for name in ("cid", "dot", "eve"):
        log.ends = [end for end in log.ends if end.peer != name]
        log.starts = [start for start in log.starts if start.peer != name]


def keep_what_was_averaged(log):
    local = start_of(log, "ann").values
    change_end(log, "ann", values=local)


def invent_a_gap(log):
    gap = {"spans": ((0, BORDER, EARLY), (20, TOTAL, LATE)), "missing": ((BORDER, 20),), "fraction": 22 / 30}
    change_result(log, **gap)


def leave_a_gap(log):
    """All keep local values where Eve reduced, though others live."""
    invent_a_gap(log)
    for name in ("ann", "bob", "cid"):
        values = event_log.copied(end_of(log, name).values)
        values[0][BORDER:] = start_of(log, name).values[0][BORDER:]
        change_end(log, name, values=values)


MUTATIONS = {
    "a value off by a thousandth": (lambda log: scale_element(log, 5, 1.001, "ann", "bob", "cid"), "the mean over"),
    "a float64 value off by 1e-12": (lambda log: scale_element(log, 25, 1 + 1e-12, "ann", "bob", "cid"), "the mean over"),
    "one value off at one member": (lambda log: scale_element(log, 29, 1.001, "cid"), "the mean over"),
    "not a number": (lambda log: scale_element(log, 5, float("nan"), "ann", "bob", "cid"), "the mean over"),
    "one bit apart": (nudge_bits, "differ in element 3"),
    "zeros of different signs": (swap_zero_signs, "differ in element 2"),
    "values never written": (keep_what_was_averaged, "the mean over"),
    "the dead one was in all of it": (lambda log: change_result(log, spans=((0, TOTAL, EARLY),)), "the mean over"),
    "the dead one was in none of it": (lambda log: change_result(log, spans=((0, TOTAL, LATE),)), "the mean over"),
    "a living one left out": (
        lambda log: change_result(log, spans=((0, BORDER, EARLY), (BORDER, TOTAL, frozenset({"ann"})))),
        "bob, to whom nothing happened, is not in the average of 12 to 30",
    ),
    "a living one excluded": (lambda log: change_result(log, excluded=frozenset({"eve", "bob"})), "excluded bob"),
    "a stranger excluded": (lambda log: change_result(log, excluded=frozenset({"zoe"})), "no member: ['zoe']"),
    "spans swapped": (lambda log: change_result(log, spans=((0, BORDER, LATE), (BORDER, TOTAL, EARLY))), "the mean over"),
    "spans out of order": (
        lambda log: change_result(log, "ann", spans=((BORDER, TOTAL, LATE), (0, BORDER, EARLY))),
        "out of order",
    ),
    "spans with a hole": (
        lambda log: change_result(log, "ann", spans=((0, BORDER, EARLY), (BORDER + 1, TOTAL, LATE))),
        "do not partition the vector at element 12",
    ),
    "spans that overlap": (
        lambda log: change_result(log, "ann", spans=((0, BORDER + 1, EARLY), (BORDER, TOTAL, LATE))),
        "do not partition the vector at element 13",
    ),
    "spans that end early": (
        lambda log: change_result(log, "ann", spans=((0, BORDER, EARLY), (BORDER, TOTAL - 1, LATE))),
        "end at element 29 of 30",
    ),
    "an empty span": (
        lambda log: change_result(log, "ann", spans=((0, 0, EARLY), (0, BORDER, EARLY), (BORDER, TOTAL, LATE))),
        "do not partition",
    ),
    "another fraction": (lambda log: change_result(log, "cid", fraction=0.9), "fraction 0.9 where 30 of 30"),
    "a gap that was averaged": (invent_a_gap, "was not averaged, but changed"),
    "a gap though others could reduce": (leave_a_gap, "12 to 20 not averaged, though"),
    "another outcome at one member": (
        lambda log: change_result(log, "cid", spans=((0, BORDER + 1, EARLY), (BORDER + 1, TOTAL, LATE))),
        "cid, step 7 tells",
    ),
    "a weightless contributor": (
        lambda log: change_result(log, spans=((0, BORDER, EARLY | {"cid"}), (BORDER, TOTAL, LATE))),
        "cid is in the average of 0 to 12, but contributes nothing",
    ),
    "an auxiliary contributor": (
        lambda log: change_result(log, spans=((0, BORDER, EARLY | {"dot"}), (BORDER, TOTAL, LATE))),
        "dot is in the average of 0 to 12, but contributes nothing",
    ),
    "a contributor from outside": (
        lambda log: change_result(log, spans=((0, BORDER, EARLY | {"zoe"}), (BORDER, TOTAL, LATE))),
        "zoe is in the average of 0 to 12, but never was in this round",
    ),
    "a member that never stepped": (
        lambda log: change_result(log, members={**dict.fromkeys(ROLES, 7), "eve": 8}),
        "eve is in the average of 0 to 12, but never was in this round",
    ),
    "a contributor that began later": (lambda log: change_start(log, "bob", time=0.7), "but began later"),
    "a group without itself": (
        lambda log: change_result(log, "cid", members=dict.fromkeys(ROLES.keys() - {"cid"}, 7)),
        "does not include itself",
    ),
    "another group": (
        lambda log: change_result(log, "ann", members=dict.fromkeys([*ROLES, "zoe"], 7)),
        "another group than the rest",
    ),
    "another weight": (lambda log: change_start(log, "bob", weight=2.51), "the mean over"),
    "a living one fails": (lambda log: fail(log, "bob"), "failed with AllreduceError: so it was, though ann"),
    "a living one in another round": (lambda log: change_result(log, "bob", round_id="second"), "ended otherwise, though"),
    "a living one diverges": (lambda log: change_result(log, "bob", diverged=True), "diverged, though nothing happened"),
    "tensors changed after a failure": (fail_and_change, "bob, step 7 failed with AllreduceError, but element 0 changed"),
    "an auxiliary's tensors changed": (change_auxiliary, "dot, step 7 is auxiliary, but element 20 changed"),
    "late": (lambda log: change_end(log, "cid", time=5.01), "returned at 5.010, due by 5.000"),
    "never": (lambda log: log.ends.remove(end_of(log, "cid")), "cid, step 7 never returned"),
    "two that did not find each other": (lose_two, "looked for a group from 0.300 to 4.900 and both failed"),
}


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_a_log_in_which_all_is_right_is_accepted(alpha):
    oracle.check(good_log(alpha))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_log_in_which_something_is_wrong_is_not(name):
    mutate, complaint = MUTATIONS[name]
    log = good_log()
    mutate(log)
    found = oracle.violations(log)
    assert any(complaint in line for line in found), found
    with pytest.raises(oracle.OracleError, match="violations"):
        oracle.check(log)


def test_with_another_alpha_values_are_still_checked_element_by_element():
    for at in range(TOTAL):
        log = good_log(alpha=0.25)
        scale_element(log, at, 1.001, "ann")
        assert [line for line in oracle.violations(log) if f"element {at} is" in line]


def test_every_element_is_compared():
    for at in range(TOTAL):
        for factor in (1.001, -1.0, 0.0):
            log = good_log()
            scale_element(log, at, factor, "ann", "bob", "cid")
            assert sum(f"element {at} is" in line for line in oracle.violations(log)) == 3


# ---- what faults excuse, and what not


def test_a_fault_excuses_whom_it_befell_and_nobody_else():
    log = good_log()
    fail(log, "bob")
    assert oracle.violations(log)
    log.faults.append(FaultApplied(kind="freeze", peers=("bob",), time=0.1, seconds=20.0))
    assert oracle.violations(log) == []
    fail(log, "cid")
    assert [line for line in oracle.violations(log) if line.startswith("cid")]


def test_a_client_that_never_heard_of_the_group_whose_leader_died_is_excused_and_a_node_is_not():
    for name, excused in (("cid", True), ("bob", False)):
        log = good_log()
        change_result(log, excluded=frozenset({"eve", name}))
        fail(log, name, "MatchmakingError")
        assert (oracle.violations(log) == []) == excused
        log.faults.clear()
        assert [line for line in oracle.violations(log) if line.startswith(f"{name}, step 7: failed")]


def test_an_auxiliary_peer_may_miss_that_a_client_has_finished_but_not_a_node():
    for name, excused in (("cid", True), ("bob", False)):
        log = good_log()
        change_result(log, "dot", excluded=frozenset({"eve", name}))
        assert (oracle.violations(log) == []) == excused


def test_an_auxiliary_peer_with_nobody_left_to_reduce_for_may_fail():
    for contributors, excused in (({"ann", "bob", "cid"}, True), ({"ann", "bob"}, False)):
        log = good_log()
        log.faults += [FaultApplied(kind="kill", peers=(name,), time=0.3) for name in sorted(contributors)]
        log.starts.append(replace(start_of(log, "dot"), peer="fay"))
        change_result(log, members=dict.fromkeys([*ROLES, "fay"], 7))
        log.ends = [end for end in log.ends if end.peer not in contributors]
        log.ends.append(replace(end_of(log, "dot"), peer="fay"))
        fail(log, "fay", "MatchmakingError")
        if not excused:
            change_result(log, "cid", spans=((0, TOTAL, frozenset()),), fraction=0.0)
            change_end(log, "cid", values=start_of(log, "cid").values)
        assert (oracle.violations(log) == []) == excused


def test_a_fault_shorter_than_the_patience_and_a_wrong_clock_excuse_nothing():
    for fault in (
        FaultApplied(kind="freeze", peers=("bob",), time=0.1, seconds=0.4),
        FaultApplied(kind="cut", peers=("ann", "bob"), time=0.1, seconds=0.4),
        FaultApplied(kind="clock", peers=("bob",), time=0.1),
    ):
        log = good_log()
        fail(log, "bob")
        log.faults.append(fault)
        assert oracle.violations(log), fault


def two_sides():
    """Ann's side has another average than Bob's and Cid's, and each tells its own."""
    log = good_log()
    change_result(log, "ann", spans=((0, TOTAL, frozenset({"ann"})),))
    change_end(log, "ann", values=start_of(log, "ann").values)
    log.ends = [end for end in log.ends if end.peer != "dot"]
    log.starts = [start for start in log.starts if start.peer != "dot"]
    change_result(log, members=dict.fromkeys(ROLES.keys() - {"dot"}, 7))
    return log


def cut(*pairs):
    return [FaultApplied(kind="cut", peers=pair, time=0.1, seconds=20.0) for pair in pairs]


def test_two_sides_of_a_partition_need_not_agree_but_each_within_itself():
    log = two_sides()
    log.faults += cut(("ann", "bob"), ("ann", "cid"))
    assert oracle.violations(log) == []
    scale_element(log, 3, 1.0 + 1e-7, "bob")
    assert [line for line in oracle.violations(log) if "differ" in line]


def test_cuts_that_leave_a_way_round_excuse_nobody():
    log = two_sides()
    log.faults += cut(("ann", "bob"))
    assert [line for line in oracle.violations(log) if "tells" in line]
    log.faults += [FaultApplied(kind="cut", peers=("ann", "cid"), time=21.0, seconds=20.0)]
    assert [line for line in oracle.violations(log) if "tells" in line]


def test_a_member_that_says_that_it_diverged_is_judged_by_its_own_words():
    log = two_sides()
    log.faults.append(FaultApplied(kind="freeze", peers=("ann",), time=0.1, seconds=20.0))
    change_result(log, "ann", diverged=True)
    assert oracle.violations(log) == []
    scale_element(log, 3, 1.001, "ann")
    assert [line for line in oracle.violations(log) if "ann, step 7: element 3" in line]


def test_a_member_may_diverge_by_what_befalls_it_while_it_still_serves_others():
    log = good_log()
    change_result(log, "bob", diverged=True)
    assert oracle.violations(log)
    log.faults.append(FaultApplied(kind="freeze", peers=("bob",), time=0.9, seconds=20.0))
    assert oracle.violations(log) == []


def test_time_spent_frozen_does_not_count():
    log = good_log()
    log.faults.append(FaultApplied(kind="freeze", peers=("bob",), time=0.1, seconds=20.0))
    change_end(log, "bob", time=24.9)
    assert oracle.violations(log) == []
    change_end(log, "bob", time=25.1)
    assert oracle.violations(log) == ["bob, step 7 returned at 25.100, due by 25.000"]


# ---- the codec's bound


def test_the_bound_of_a_codec_is_granted_and_no_more():
    log = good_log()
    for end in list(log.ends):
        values = tuple(array.astype(np.float16).astype(array.dtype) for array in end.values)
        change_end(log, end.peer, values=start_of(log, end.peer).values if end.peer == "dot" else values)
    assert oracle.violations(log)
    log.codec_relative, log.codec_absolute = 2.0**-11, 2.0**-25
    assert oracle.violations(log) == []
    scale_element(log, 5, 1.01, "ann", "bob", "cid")
    assert oracle.violations(log)


# ---- where it stands, and a real run


def test_the_oracle_shares_no_code_with_the_product():
    own = {f"swarmavg.testing.{name}" for name in ("event_log", "oracle_values", "troubles")}
    for module in (oracle, oracle_values, event_log, troubles):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        imported = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        foreign = {name for name in imported - own if name.split(".")[0] not in {"numpy", *sys.stdlib_module_names}}
        assert not foreign


@pytest.mark.parametrize("compression", [None, Float16Compression()], ids=["lossless", "float16"])
def test_a_real_run_is_accepted_and_its_forgery_is_not(compression):
    async def main():
        codec = {} if compression is None else {"codec_relative": 2.0**-11, "codec_absolute": 2.0**-25}
        recorder = Recorder(patience=0.5, grouping=10.0, **codec)
        async with SimulatedSwarm() as swarm:
            roles: list[RoleName] = ["node", "client", "auxiliary", "node"]
            for number, role in enumerate(roles):
                tensors = [torch.randn(40), torch.randn(3, 7).double()]
                averager = await swarm.averager(
                    tensors, role=role, target_group_size=4, part_size_bytes=64, compression=compression
                )
                weight = None if role == "auxiliary" else 0.5 + number
                recorder.start(swarm, averager, tensors, name=f"peer {number}", weight=weight, timeout=10.0)
            await recorder.all_ended()
        return recorder.finish()

    log = run_virtual(main)
    oracle.check(log)
    assert len(log.ends) == 4
    forged = event_log.copied(log.ends[0].values)
    forged[0][7] *= 1.001 if compression is None else 1.01
    log.ends[0] = replace(log.ends[0], values=forged)
    assert oracle.violations(log)
