"""A result of a member that is out, which arrives in the very pass of the event loop in which the fence does, is not taken."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmavg import FencedError, StepResult
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.round_scene import Scene


@pytest.mark.parametrize("roles", ["nnn", "nnnn"])
@pytest.mark.parametrize("weight", [1.0, 0.0], ids=["contributing", "weightless"])
def test_nothing_becomes_held_between_the_report_and_the_assignments(roles, weight):
    async def main():
        async with Scene(roles, parts=1) as scene:
            who = {}

            def hold_back(source, _target):
                who["frozen"] = source
                scene.stall(source, *scene.others(source))
                asyncio.get_running_loop().call_later(0.2, scene.swarm.freeze, source)

            def release(_source, target):
                who.setdefault("receiver", target)
                network, ids = scene.swarm.network, scene.swarm.ids
                asyncio.get_running_loop().call_later(0.0, network.unstall, ids[who["frozen"]], ids[target])

            scene.when(lambda content, source, _: content == "result" and source != scene.leader, hold_back, "sending")
            scene.when(
                lambda content, source, target: content == "fence" and source == scene.leader and target != who["frozen"],
                release,
                "sent",
            )
            light = next(number for number in range(len(roles)) if number != scene.leader)
            steps = [
                asyncio.create_task(
                    scene.swarm.step(number, weight=weight if number == light else 1.0, timeout=60, allow_retries=False)
                )
                for number in range(len(roles))
            ]
            await asyncio.sleep(30)
            scene.swarm.thaw(who["frozen"])
            outcomes = await asyncio.gather(*steps, return_exceptions=True)
            await asyncio.sleep(5)
            survivors = [number for number in range(len(roles)) if number != who["frozen"]]
            assert isinstance(outcomes[who["frozen"]], FencedError)
            results = [outcome for outcome in outcomes if isinstance(outcome, StepResult)]
            assert len(results) == len(survivors)
            for number, result in zip(survivors, results, strict=True):
                assert result.contributors == results[0].contributors
                assert torch.equal(scene.tensors[number], scene.tensors[survivors[0]])
                assert not result.diverged

    run_virtual(main)
