"""A trainer of `test_leaving`: joins, comes to a given place, prints its id there, and goes on until it is made to leave.

Arguments: the facade (``sync``, ``forgetful``, ``async``), the place, the ending, and where the swarm is.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import swarmavg
import swarmavg.sync
from swarmavg import AveragingStage

ELEMENTS = 1_000_000
"""4 MB: more than fits into the buffers between two processes, so that who is in mid-round waits with data in flight."""

PATIENCE: dict[str, Any] = {
    "min_matchmaking_time": 100.0,
    "request_timeout": 90.0,
    "sender_timeout": 100.0,
    "reducer_timeout": 200.0,
}
"""Nobody who waits for a time-out would get through the test: group mates go on because they are told."""

STAGES = {
    "searching": AveragingStage.LOOKING_FOR_GROUP,
    "waiting": AveragingStage.AWAITING_TRIGGER,
    "averaging": AveragingStage.RUNNING_ALLREDUCE,
}
TIMEOUT = 100.0
HANDLERS = {"as-ctrl-c": 0, "as-exit": 1}
"""What to do on SIGTERM, by the number of its block of code in the guide."""


OPTIONS: dict[str, Any] = {"prefix": "run", "target_group_size": 3, "min_group_size": 3, **PATIENCE}
"""Of the averagers of the trainer and its mates alike."""


def documented_code() -> list[str]:
    guide = Path(__file__).resolve().parents[2] / "docs/how-to/stop-a-trainer.md"
    return re.findall(r"^```python\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE)


def say_who(peer: swarmavg.Peer | swarmavg.sync.Peer) -> None:
    print(peer.id, flush=True)


class Trouble:
    """An error of the trainer's own, raised when standard input says so, in trainers that are to end of one."""

    def __init__(self, ending: str) -> None:
        self._due = threading.Event()
        if ending == "error":
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        os.read(0, 1)
        self._due.set()

    def check(self) -> None:
        if self._due.is_set():
            raise LookupError("of the trainer")


# The blocking API


def sync_trainer(place: str, ending: str, bootstrap: str) -> None:
    with swarmavg.sync.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[bootstrap]) as peer:
        if place == "training":
            sync_training(peer, ending)
        with swarmavg.sync.Averager([torch.ones(ELEMENTS)], peer=peer, **OPTIONS) as averager:
            stay_sync(averager, place, ending)


def forgetful_trainer(place: str, ending: str, bootstrap: str) -> None:
    """Closes nothing."""
    peer = swarmavg.sync.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[bootstrap]).start()
    stay_sync(swarmavg.sync.Averager([torch.ones(ELEMENTS)], peer=peer, **OPTIONS).start(), place, ending)


def stay_sync(averager: swarmavg.sync.Averager, place: str, ending: str) -> None:
    trouble = Trouble(ending)
    control = averager.step(wait=False, timeout=TIMEOUT, require_trigger=place == "waiting")
    while control.stage is not STAGES[place]:
        time.sleep(0.01)
    say_who(averager.peer)
    while ending == "error":
        trouble.check()
        time.sleep(0.01)
    control.result()


def sync_training(peer: swarmavg.sync.Peer, ending: str) -> None:
    """Computes without end, while a delayed round goes on in the background."""
    trouble = Trouble(ending)
    weight = torch.nn.Parameter(torch.ones(ELEMENTS))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with swarmavg.sync.TrainingStateAverager(peer=peer, optimizer=optimizer, **OPTIONS) as averager:
        averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": TIMEOUT})
        say_who(peer)
        while True:
            weight.square().sum().backward()
            averager.step(optimizer_step=True, zero_grad=True, wait_for_delayed_update=False)
            trouble.check()


# The async API


async def async_trainer(place: str, ending: str, bootstrap: str) -> None:
    async with swarmavg.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[bootstrap]) as peer:
        if place == "training":
            await async_training(peer, ending)
        async with swarmavg.Averager([torch.ones(ELEMENTS)], peer=peer, **OPTIONS) as averager:
            trouble = Trouble(ending)
            control = await averager.step(wait=False, timeout=TIMEOUT, require_trigger=place == "waiting")
            while control.stage is not STAGES[place]:
                await asyncio.sleep(0.01)
            say_who(peer)
            while ending == "error":
                trouble.check()
                await asyncio.sleep(0.01)
            await control


async def async_training(peer: swarmavg.Peer, ending: str) -> None:
    trouble = Trouble(ending)
    weight = torch.nn.Parameter(torch.ones(ELEMENTS))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    async with swarmavg.TrainingStateAverager(peer=peer, optimizer=optimizer, **OPTIONS) as averager:
        await averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": TIMEOUT})
        say_who(peer)
        while True:
            weight.square().sum().backward()
            await averager.step(optimizer_step=True, zero_grad=True, wait_for_delayed_update=False)
            trouble.check()


def main(facade: str, place: str, ending: str, bootstrap: str) -> None:
    if ending in HANDLERS:
        exec(documented_code()[HANDLERS[ending]], {})
    if facade == "async":
        asyncio.run(async_trainer(place, ending, bootstrap))
    else:
        {"sync": sync_trainer, "forgetful": forgetful_trainer}[facade](place, ending, bootstrap)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
