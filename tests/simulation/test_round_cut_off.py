"""Members that stand still, are slow, or are cut off from some of the others: who stays in, and what everybody then holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarmavg import FencedError, StepResult
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.round_scene import NOTICED, PART, Scene

DEFAULTS: dict[str, Any] = {
    "request_timeout": 3.0,
    "min_matchmaking_time": 5.0,
    "sender_timeout": None,
    "reducer_timeout": None,
}
"""The time limits that an averager has when none are given."""


def other_than_leader(scene, *, content="part"):
    """Chooses messages of reducers that do not coordinate."""
    return lambda found, source, _target: found == content and source != scene.leader and scene.roles[source] == "node"


# ---- processes that stand still


def test_who_wakes_up_after_its_exclusion_fails_with_unchanged_tensors():
    async def main():
        async with Scene("nnnn", parts=3) as scene:
            frozen = []

            def freeze(source, _target):
                frozen.append(source)
                scene.freeze(source, 20.0)

            scene.when(other_than_leader(scene), freeze)
            await scene.step(allow_retries=False)
            scene.check(scene.others(*frozen), outs=frozen)
            assert isinstance(scene.outcomes[frozen[0]], FencedError)
            assert "silent" in str(scene.outcomes[frozen[0]])
            assert scene.seconds[frozen[0]] < 20 + 2

    run_virtual(main)


def test_a_coordinator_that_wakes_up_after_its_exclusion_fails_as_any_other_member():
    async def main():
        async with Scene("nnnn", parts=3) as scene:
            scene.when(
                lambda content, source, _: content == "part" and source == scene.leader, lambda s, _: scene.freeze(s, 20.0)
            )
            await scene.step(allow_retries=False)
            scene.check(scene.others(scene.leader), outs=[scene.leader])
            assert isinstance(scene.outcomes[scene.leader], FencedError)
            assert scene.seconds[scene.leader] < 20 + 2
            assert any("I take over as the coordinator" in scene.story(number) for number in scene.others(scene.leader))

    run_virtual(main)


def test_who_wakes_up_after_its_exclusion_and_had_committed_learns_that_it_has_diverged():
    async def main():
        async with Scene("nnnn") as scene:
            frozen = []

            def vanish(source, _target):
                frozen.append(source)
                scene.freeze(source, 20.0)
                scene.cut([source], scene.others(source), seconds=19.0)

            scene.when(other_than_leader(scene, content="done"), vanish, "sending")
            await scene.step()
            (gone,) = frozen
            assert isinstance(scene.outcomes[gone], StepResult)
            assert scene.result(gone).diverged
            for number in scene.others(gone):
                assert not scene.result(number).diverged
                assert torch.equal(scene.tensors[number], scene.tensors[scene.leader])
                assert scene.contributors(number) == [(0, 4 * PART, frozenset(range(4)))]
            assert f"without {scene.name(gone)} (" in scene.story(scene.leader)

    run_virtual(main)


@pytest.mark.parametrize("leads", [False, True], ids=["member", "leader"])
@pytest.mark.parametrize("number", [1, 4])
def test_a_pause_of_a_process_that_is_shorter_than_the_patience_costs_nobody_his_place(number, leads):
    async def main():
        async with Scene("nnnn", parts=3, **DEFAULTS) as scene:
            sent: list[int] = []

            def chosen(content, source, _target):
                if content == "part" and (source == scene.leader) == leads and source in (*sent[:1], source):
                    sent.append(source)
                return len(sent) == number

            scene.when(chosen, lambda source, _: scene.freeze(source, 3.0))
            await scene.step()
            scene.check(range(4), within=5.0)
            assert scene.contributors(0) == [(0, 12 * PART, frozenset(range(4)))]

    run_virtual(main)


def test_a_coordinator_that_pauses_while_reports_come_in_reads_them_before_it_calls_anybody_silent():
    async def main():
        async with Scene("nnnnn", parts=2, **DEFAULTS) as scene:
            happened = []

            def kill(source, _target):
                scene.swarm.kill(source, abrupt=True)
                happened.append(source)

            scene.when(other_than_leader(scene, content="result"), kill, "sending")
            is_fence = lambda content, source, _: content == "fence" and source == scene.leader
            scene.when(is_fence, lambda source, _: scene.freeze(source, 6.0))
            await scene.step()
            scene.check(scene.others(*happened), outs=happened, within=9.0)

    run_virtual(main)


# ---- members that never come


@pytest.mark.parametrize("how", ["dead", "frozen", "cut off"])
def test_a_member_that_is_in_the_group_but_never_comes_is_not_waited_for_longer_than_the_patience(how):
    async def main():
        async with Scene("nnnn", parts=2) as scene:
            absent = []

            def vanish(_source, target):
                absent.append(target)
                if how == "dead":
                    scene.swarm.kill(target)
                elif how == "frozen":
                    scene.freeze(target, 60.0)
                else:
                    scene.cut([target], scene.others(target), seconds=60.0)

            scene.when(lambda content, *_: content == "begin", vanish, "sending" if how == "cut off" else "received")
            await scene.step(allow_retries=False)
            survivors = scene.others(*absent)
            for number in survivors:
                assert isinstance(scene.outcomes[number], StepResult), scene.outcomes[number]
            scene.check(survivors, outs=absent)
            assert scene.contributors(survivors[0]) == [(0, 8 * PART, frozenset(survivors))]

    run_virtual(main)


# ---- false suspicions


def reducer_and_reader(scene, found):
    """Chooses the first result of a reducer for a peer, neither of which coordinates."""

    def chosen(content, source, target):
        if content == "result" and scene.leader not in (source, target):
            found.extend([source, target])
            return True
        return False

    return chosen


@pytest.mark.parametrize("rate", [None, 50.0], ids=["stalled", "slow"])
def test_a_reducer_that_is_too_slow_for_one_peer_alone_stays_in_and_its_result_comes_by_another_way(rate):
    async def main():
        async with Scene("nnnn", parts=4) as scene:
            found: list[int] = []

            def slow_down(source, target):
                if rate is None:
                    scene.stall(source, target)
                else:
                    ids = scene.swarm.ids
                    scene.swarm.network.set_link(ids[source], ids[target], bandwidth=rate)

            scene.when(reducer_and_reader(scene, found), slow_down, "sending")
            await scene.step()
            reducer, reader = found
            scene.check(range(4), outs=[reader, reducer])
            told = scene.excluded(reader)
            assert told.pop(reader) == "severed"
            assert told in ({}, {reducer: "silent"}, {reducer: "stalled"})
            assert scene.contributors(reader) == [(0, 16 * PART, frozenset(range(4)))]
            story = scene.story(scene.leader)
            assert "new term, without nobody; channels that failed: " in story
            assert f"{scene.name(reader)} to {scene.name(reducer)} (" in story
            assert "passes on" in story
            assert "anew" not in story

    run_virtual(main)


def test_a_contributor_that_is_too_slow_for_one_reducer_is_missing_from_that_range_and_holds_all_the_same():
    async def main():
        async with Scene("nnnn", parts=4) as scene:
            found = []

            def chosen(content, source, target):
                return content == "part" and scene.leader not in (source, target)

            def stall(source, target):
                scene.stall(source, target)
                found.extend([source, target])

            scene.when(chosen, stall, "sending")
            await scene.step()
            contributor, reducer = found
            scene.check(range(4), outs=[contributor, reducer])
            lists = {members for _, _, members in scene.contributors(reducer)}
            assert frozenset(range(4)) in lists
            assert frozenset(scene.others(contributor)) in lists

    run_virtual(main)


# ---- cuts


@pytest.mark.parametrize("roles", ["nnn", "nnnn", "nnnnn"])
@pytest.mark.parametrize("with_leader", [False, True], ids=["members", "leader"])
def test_two_that_cannot_reach_each_other_stay_in_as_long_as_others_reach_both(roles, with_leader):
    async def main():
        async with Scene(roles, parts=2) as scene:
            pair = []

            def cut(source, target):
                scene.cut([source], [target], seconds=60.0)
                pair.extend([source, target])

            def chosen(content, *ends):
                return content == "part" and (scene.leader in ends) == with_leader

            scene.when(chosen, cut, "sending")
            await scene.step()
            scene.check(range(len(roles)), outs=pair, within=NOTICED + 4)
            assert all(set(told) <= {"severed", "silent", "never-arrived", "unreachable"} for told in codes(scene))

    run_virtual(main)


def codes(scene):
    return [scene.excluded(number).values() for number in range(len(scene.roles))]


def test_a_client_that_is_cut_off_from_the_coordinator_alone_is_kept_by_another():
    async def main():
        async with Scene("nnnc", parts=2) as scene:
            scene.when(
                lambda content, source, target: content == "part" and (source, target) == (3, scene.leader),
                lambda source, target: scene.cut([source], [target], seconds=60.0),
                "sending",
            )
            await scene.step()
            scene.check(range(4), outs=[3, scene.leader], within=NOTICED + 4)

    run_virtual(main)


def test_each_side_of_a_partition_agrees_within_itself_and_they_meet_again_afterwards():
    async def main():
        async with Scene("nnnnn", parts=2) as scene:
            sides = []

            def cut(source, _target):
                small = {source, next(iter(scene.others(source)))}
                sides.extend([small, set(scene.others(*small))])
                scene.cut(*sides, seconds=25.0)

            scene.when(lambda content, *_: content == "part", cut)
            await scene.step()
            for side in sides:
                first = min(side)
                for number in side:
                    assert scene.result(number).fraction == 1.0
                    assert not scene.result(number).diverged
                    assert scene.contributors(number) == scene.contributors(first)
                    assert torch.equal(scene.tensors[number], scene.tensors[first])
                    assert scene.seconds[number] < NOTICED + 4
                    scene.check_values(number)
                    assert set(scene.excluded(number)) <= set(scene.others(*side))
            results = await scene.swarm.step_all(scene.averagers, timeout=60)
            assert all(result.group_size == 5 and not result.excluded for result in results)
            assert all(torch.equal(tensor, scene.tensors[0]) for tensor in scene.tensors)

    run_virtual(main)


# ---- clocks


def test_clocks_that_are_hours_apart_or_set_in_mid_round_move_no_decision():
    plan = FaultPlan().skew_clock(1, hours=5).skew_clock(3, hours=400).step_clock(0, hours=-7).at_part(2)
    plan = plan.step_clock(2, hours=9).at_result(1).kill(3, abrupt=True).at_part(3)

    async def main():
        async with Scene("nnnn", parts=2, faults=plan) as scene:
            await scene.step()
            scene.check([0, 1, 2], outs=[3], within=1.6)
            assert len(plan.events) == len(plan.faults), plan.unapplied

    run_virtual(main)


# ---- stories


def test_the_story_of_a_round_names_the_dead_the_reason_and_who_took_over():
    async def main():
        async with Scene("nnnn", parts=2) as scene:
            scene.when(
                lambda content, source, _: content == "part" and source == scene.leader,
                lambda source, _: scene.swarm.kill(source, abrupt=True),
            )
            await scene.step()
            survivors = scene.others(scene.leader)
            scene.check(survivors, outs=[scene.leader], within=2.0)
            for number in survivors:
                story = scene.story(number)
                assert f"a new term, without {scene.name(scene.leader)} (" in story or number in heirs(scene)
                assert f"lost {scene.name(scene.leader)}: " in story or f"I suspect {scene.name(scene.leader)}: " in story
            (heir,) = heirs(scene)
            for number in scene.others(scene.leader, heir):
                assert f"from {scene.name(heir)}: a new term, without {scene.name(scene.leader)} (" in scene.story(number)
            assert " anew from 3 inputs" in scene.story(heir)
            lines = scene.story(heir).splitlines()
            assert f"begins; leader {scene.name(scene.leader)}; members in order: " in lines[0]
            assert [float(line.split()[0]) for line in lines] == sorted(float(line.split()[0]) for line in lines)

    run_virtual(main)


def heirs(scene):
    return [n for n in scene.others(scene.leader) if "I take over as the coordinator" in scene.story(n)]


def test_a_story_that_is_asked_for_by_another_name_is_refused_with_it():
    async def main():
        async with Scene("nn") as scene:
            await scene.step()
            with pytest.raises(ValueError, match="no-such-round"):
                scene.averagers[0].story("no-such-round")
            await asyncio.sleep(0)

    run_virtual(main)
