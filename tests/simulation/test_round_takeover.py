"""Members that die or leave in mid-round: who takes over, and what the others then hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from swarmavg import AllreduceError, AveragingStage
from swarmavg.compression import Float16Compression
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.processes import ProcessKilledError
from swarmavg.testing.round_scene import PART, Scene

PROMPT = 1.6
"""Virtual seconds for a whole step in which a member dies or leaves noticeably: no time limit of a silent one in it."""


def kill_at_first_result(scene):
    """The first reducer that is not the leader dies when one result of its only part is under way. Who gets it is returned."""
    happened = []

    def act(source, target):
        scene.swarm.kill(source)
        happened.extend([source, target])

    scene.when(lambda content, source, _target: content == "result" and source != scene.leader, act)
    return happened


def full_house(scene, number):
    """Elements in whose average everybody is."""
    return sum(stop - start for start, stop, members in scene.contributors(number) if len(members) == len(scene.roles))


# ---- a reducer dies


@pytest.mark.parametrize("weights", [None, [1.0, 0.0, 2.0, 1.0], [3.0, 1.0, 2.0, 4.0]], ids=str)
def test_a_result_that_reached_one_of_three_is_passed_on_with_the_dead_in_it(weights):
    async def main():
        async with Scene("nnnn", weights=weights) as scene:
            happened = kill_at_first_result(scene)
            await scene.step()
            victim, holder = happened
            scene.check(scene.others(victim), outs=[victim], within=PROMPT)
            contributing = {number for number in range(4) if scene.weights[number]}
            assert scene.contributors(holder) == [(0, 4 * PART, frozenset(contributing))]
            story = scene.story(scene.leader)
            assert f"without {scene.name(victim)} (" in story
            assert "passes on 1 part" in story
            assert "anew" not in story

    run_virtual(main)


def test_a_lossy_codec_changes_nothing_of_that():
    tensors = [torch.randn(4 * PART * 2, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    async def main():
        async with Scene("nnnn", tensors=tensors, tolerance=2e-3, compression=Float16Compression()) as scene:
            happened = kill_at_first_result(scene)
            await scene.step()
            scene.check(scene.others(happened[0]), outs=happened[:1], within=PROMPT)
            assert full_house(scene, happened[1]) == len(tensors[0])

    run_virtual(main)


def test_a_result_that_only_a_client_holds_travels_by_way_of_another_member():
    async def main():
        async with Scene("nnnc") as scene:
            happened = []

            def hold_back(source, _target):
                scene.stall(source, *scene.others(source, 3))
                scene.when(lambda content, a, b: (content, a, b) == ("result", source, 3), kill, "received")

            def kill(source, _target):
                scene.swarm.kill(source, abrupt=True)
                happened.append(source)

            scene.when(lambda content, source, _: content == "result" and source != scene.leader, hold_back, "sending")
            await scene.step()
            scene.check(scene.others(*happened), outs=happened, within=PROMPT)
            assert full_house(scene, 3) == 3 * PART
            assert f"passes on 1 part that {scene.name(3)} holds or gets" in scene.story(scene.leader)

    run_virtual(main)


def test_what_nobody_holds_is_reduced_anew_from_the_inputs_of_the_living():
    async def main():
        async with Scene("nnnn", parts=3) as scene:
            happened = []

            def kill(source, _target):
                scene.swarm.kill(source, abrupt=True)
                happened.append(source)

            scene.when(lambda content, source, _: content == "result" and source != scene.leader, kill, "sending")
            await scene.step()
            survivors = scene.others(*happened)
            scene.check(survivors, outs=happened, within=PROMPT)
            assert {members for _, _, members in scene.contributors(survivors[0])} >= {frozenset(survivors)}
            assert full_house(scene, survivors[0]) < 12 * PART
            assert "anew from 3 inputs" in scene.story(scene.leader)

    run_virtual(main)


def test_an_auxiliary_peer_reduces_anew_for_clients_that_have_lost_their_only_node():
    async def main():
        async with Scene("ncca", parts=2) as scene:
            kill = lambda *_: scene.swarm.kill(0, abrupt=True)
            scene.when(lambda content, source, _: (content, source) == ("result", 0), kill, "sending")
            await scene.step()
            scene.check([1, 2, 3], outs=[0], within=PROMPT)
            assert frozenset({1, 2}) in {members for _, _, members in scene.contributors(1)}
            assert f"{scene.name(3)} reduces" in scene.story(3)

    run_virtual(main)


def test_at_alpha_one_half_a_holder_that_has_committed_passes_on_the_average_and_not_its_blend():
    async def main():
        async with Scene("nnnn", averaging_alpha=0.5) as scene:
            happened = []

            def hold_back(source, target):
                late = next(number for number in scene.others(source, target) if number != scene.leader)
                scene.stall(source, late)
                scene.when(lambda content, _a, b: content == "done" and b == scene.leader, kill)
                happened.append(source)

            def kill(_source, _target):
                scene.swarm.kill(happened[0], abrupt=True)

            scene.when(lambda content, source, _: content == "result" and source != scene.leader, hold_back, "sending")
            await scene.step()
            scene.check(scene.others(*happened), outs=happened, within=PROMPT)
            assert full_house(scene, scene.leader) == 4 * PART

    run_virtual(main)


# ---- the coordinator dies


def survive_without_the_leader(scene, lost):
    survivors = scene.others(*lost)
    scene.check(survivors, outs=lost, within=PROMPT + 0.5)
    stories = "\n".join(scene.story(number) for number in survivors)
    assert "I take over as the coordinator" in stories
    return stories


def test_the_leader_dies_before_the_trigger():
    async def main():
        async with Scene("nnnn") as scene:
            waiting = [
                await scene.swarm.run(number, averager.step(wait=False, require_trigger=True, timeout=60))
                for number, averager in enumerate(scene.averagers)
            ]
            while {control.stage for control in waiting} != {AveragingStage.AWAITING_TRIGGER}:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            scene.swarm.kill(scene.leader)
            await asyncio.sleep(2)
            for control in waiting:
                control.allow_allreduce()
            await scene.steps({number: scene.swarm.run(number, result_of(control)) for number, control in enumerate(waiting)})
            assert isinstance(scene.outcomes[scene.leader], ProcessKilledError)
            survivors = scene.others(scene.leader)
            scene.check(survivors, outs=[scene.leader], within=PROMPT)
            assert scene.contributors(survivors[0]) == [(0, 4 * PART, frozenset(survivors))]

    run_virtual(main)


async def result_of(control):
    return await control


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_leader_dies_in_mid_transfer(number):
    async def main():
        async with Scene("nnnn", parts=3) as scene:
            sent = []

            def is_nth_part(content, source, _target):
                if content == "part" and source == scene.leader:
                    sent.append(source)
                return len(sent) == number

            scene.when(is_nth_part, lambda source, _: scene.swarm.kill(source))
            await scene.step()
            survive_without_the_leader(scene, [scene.leader])

    run_virtual(main)


def test_the_leader_dies_while_it_collects_the_reports_about_another_death():
    async def main():
        async with Scene("nnnnn") as scene:
            happened = kill_at_first_result(scene)
            scene.when(
                lambda content, _, target: content == "report" and target == scene.leader,
                lambda _, target: scene.swarm.kill(target),
                "received",
            )
            await scene.step()
            stories = survive_without_the_leader(scene, [happened[0], scene.leader])
            assert "without " in stories
            assert scene.name(happened[0]) in stories

    run_virtual(main)


def test_the_leader_dies_when_its_assignments_have_reached_one_member_only():
    async def main():
        async with Scene("nnnnn") as scene:
            happened = kill_at_first_result(scene)
            scene.when(
                lambda content, source, _: content == "assign" and source == scene.leader,
                lambda source, _: scene.swarm.kill(source),
            )
            await scene.step()
            survive_without_the_leader(scene, [happened[0], scene.leader])

    run_virtual(main)


@pytest.mark.parametrize("moment", ["sending", "sent"])
def test_the_leader_dies_when_all_have_committed_and_nobody_or_one_has_heard_so(moment):
    async def main():
        async with Scene("nnnn") as scene:
            scene.when(lambda content, *_: content == "closed", lambda source, _: scene.swarm.kill(source), moment)
            await scene.step()
            scene.check(range(4), outs=[scene.leader], within=PROMPT)  # its own step had returned before
            assert full_house(scene, 0) == 4 * PART
            assert "the round is over" in scene.story(scene.others(scene.leader)[0])

    run_virtual(main)


# ---- members that leave


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("who", ["reducer", "client", "leader"])
def test_whoever_leaves_in_mid_round_is_missed_at_once_and_not_after_a_time_limit(who, how):
    async def main():
        async with Scene("nnnc", parts=3) as scene:
            left: list[int] = []
            tasks: dict[object, asyncio.Task[Any]] = {}

            def is_it(number):
                return {"leader": number == scene.leader, "client": number == 3}.get(who, number not in (3, scene.leader))

            def leave(source, _target):
                left.append(source)
                if how == "cancel":
                    asyncio.get_running_loop().call_soon(tasks[source].cancel)
                else:
                    process = scene.swarm.process(source)
                    tasks["closing"] = process.start(scene.averagers[source].aclose())

            scene.when(lambda content, source, _: content == "part" and is_it(source), leave)
            for number in range(4):
                step = scene.swarm.step(number, weight=1.0, timeout=100)
                tasks[number] = asyncio.create_task(step)
            await scene.steps({number: tasks[number] for number in range(4)})
            scene.check(scene.others(*left), outs=left, within=PROMPT)
            assert scene.seconds[left[0]] < PROMPT
            for number in scene.others(*left):
                assert scene.excluded(number) in ({left[0]: "cancelled"}, {})
            assert any(scene.excluded(number) for number in scene.others(*left))

    run_virtual(main)


# ---- those who are left


def test_who_is_left_alone_fails_with_the_reasons_and_unchanged_tensors():
    async def main():
        async with Scene("nn", parts=3) as scene:
            victim, survivor = 0, 1
            kill = lambda *_: scene.swarm.kill(victim, abrupt=True)
            scene.when(lambda content, source, _: (content, source) == ("part", victim), kill, "sending")
            await scene.step(allow_retries=False)
            error = scene.outcomes[survivor]
            assert isinstance(error, AllreduceError)
            assert scene.swarm.ids[victim] in error.reasons
            scene.check_unchanged(survivor)
            assert scene.seconds[survivor] < PROMPT

    run_virtual(main)


def test_survivors_of_a_failed_group_meet_again_and_start_from_the_tensors_as_they_were():
    async def main():
        patient: dict[str, Any] = {"sender_timeout": 20.0, "reducer_timeout": 40.0, "allreduce_timeout": 2.0}
        async with Scene("nnnn", parts=3, **patient) as scene:
            happened = []

            def freeze(source, _target):
                scene.swarm.freeze(source)
                happened.append(source)

            scene.when(lambda content, source, _: content == "part" and source != scene.leader, freeze)

            async def thaw_in_the_end():
                await asyncio.sleep(30)
                scene.swarm.thaw(happened[0])

            thawing = asyncio.create_task(thaw_in_the_end())
            await scene.step()
            await thawing
            survivors = scene.others(*happened)
            scene.check(survivors, within=12.0, attempts=2)
            assert scene.contributors(survivors[0]) == [(0, 12 * PART, frozenset(survivors))]

    run_virtual(main)
