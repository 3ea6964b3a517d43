"""An exception in the trainer takes it out of the swarm within two seconds, though a group mate has stopped answering."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import pytest
import torch

from swarmavg.averager import Averager
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.network import SimulatedSwarm

BOUND = 2.0
EVERYTHING = os.environ.get("SWARMAVG_SIMULATE") == "all"
MESSAGES = range(5, 60, 1 if EVERYTHING else 6)
"""After sending so many the mate stands still: while looking for a group, in the round, after it."""
PAUSES = (0.0, 0.5, 3.0)


class TroubleError(Exception):
    """Of the trainer."""


async def leaving(averager: Averager, trouble: asyncio.Event, swarm: SimulatedSwarm) -> float:
    """Average until there is trouble; returns how long it took to be out of the swarm then."""
    loop = asyncio.get_running_loop()
    with pytest.raises(TroubleError):
        async with swarm.peers[0], averager:
            control = await averager.step(wait=False)
            await trouble.wait()
            noticed = loop.time()
            raise TroubleError
    assert control.done()
    return loop.time() - noticed


async def seconds(message: int, pause: float) -> float | None:
    """How long peer 0 takes to leave, `pause` seconds after peer 2 has stopped; `None` if that peer never sent as much."""
    plan = FaultPlan(seed=1).freeze(2).after_message(message)
    async with SimulatedSwarm(seed=3, directory="gossip", faults=plan) as swarm:
        tensors = [torch.full((60_000,), float(number)) for number in range(3)]
        averagers = await swarm.averagers([[tensor] for tensor in tensors], part_size_bytes=40_000)
        trouble = asyncio.Event()
        trainer = asyncio.create_task(swarm.run(0, leaving(averagers[0], trouble, swarm)))
        others = [asyncio.create_task(swarm.step(averager, timeout=100)) for averager in averagers[1:]]
        for _ in range(500):
            if plan.events:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(pause)
        trouble.set()
        took = await trainer
        frozen = bool(plan.events)
        swarm.thaw(2)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return took if frozen else None


@pytest.mark.parametrize("pause", PAUSES)
def test_a_mate_that_stands_still_does_not_hold_up_a_leave(pause: float) -> None:
    times = [run_virtual(partial(seconds, message, pause)) for message in MESSAGES]
    slow = {message: took for message, took in zip(MESSAGES, times, strict=True) if took is not None and took > BOUND}
    assert not slow
    assert sum(took is not None for took in times) > len(times) // 2  # else the mate sends less than this test thinks
