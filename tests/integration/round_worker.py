"""One process of `test_round_processes`: averages when told to, says when it has come to a given point, and judges its result.

Takes orders from standard input and answers on standard output, a JSON object a line. An averager lives as long as the process,
as in a trainer.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import sys
import threading
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import torch

import swarmavg

WEIGHTS = (1.0, 0.5, 2.0, 1.25, 3.0)
PERIOD = 4099
"""Inputs repeat after so many elements, a prime: a part that lands in the wrong place shows."""
TOLERANCE = 1e-6
"""For values of about 1: some roundings of float32."""

Reference = np.ndarray[Any, np.dtype[np.float64]]


def input_of(rank: int) -> Reference:
    """One period of a process's input."""
    return np.random.default_rng(rank).standard_normal(PERIOD).astype(np.float32).astype(np.float64)


def mean_of(ranks: list[int]) -> Reference:
    """One period of the weighted mean of these inputs."""
    total = np.zeros(PERIOD)
    for rank in ranks:
        total += WEIGHTS[rank] * input_of(rank)
    return total / sum(WEIGHTS[rank] for rank in ranks)


def wrong_elements(tensor: torch.Tensor, result: swarmavg.StepResult, rank: int) -> int:
    """Elements that are not the weighted mean over those who are in them as the result says, or of which it says nothing."""
    values, wrong, told = tensor.numpy(), 0, 0
    spans = [(span, [result[member] for member in members] or [rank]) for span, members in result.contributors]
    for span, ranks in [*spans, *((span, [rank]) for span in result.missing)]:
        expected = np.resize(np.roll(mean_of(ranks), -span.start), len(span))
        wrong += int((np.abs(values[span.start : span.stop] - expected) > TOLERANCE).sum())
        told += len(span)
    return wrong + abs(len(values) - told)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.numpy().data, digest_size=16).hexdigest()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


class Worker:
    """A peer that averages, time and again."""

    def __init__(self, rank: int, elements: int, peer: swarmavg.Peer, averagers: AsyncExitStack) -> None:
        self._rank = rank
        self._peer = peer
        self._averagers = averagers
        self._all = torch.empty(elements)
        self._tensor = self._all
        self._result: swarmavg.StepResult | None = None

    async def obey(self, order: dict[str, Any]) -> None:
        if order.pop("do") == "average":
            await self._average(**order)
        else:
            assert self._result is not None
            say(diverged=self._result.diverged, digest=digest(self._tensor))

    async def _average(
        self, group: int, prefix: str, elements: int, point: float | None, own_signal: int | None, options: dict[str, Any]
    ) -> None:
        """Average `elements` elements with `group` others. With `point`, say so when that fraction of the results is here, or
        for more than 1 when the step is over; and then send `own_signal` to this process itself.
        """
        self._tensor = self._all[:elements]
        self._tensor.numpy()[:] = np.resize(input_of(self._rank), elements)
        before = digest(self._tensor)
        averager = swarmavg.Averager(
            [self._tensor],
            peer=self._peer,
            prefix=prefix,
            target_group_size=group,
            min_group_size=group,
            min_matchmaking_time=60,
            **options,
        )
        await self._averagers.enter_async_context(averager)
        say(ready=True)
        control = await averager.step(
            gather=self._rank, weight=WEIGHTS[self._rank], timeout=100, allow_retries=False, wait=False
        )
        if point is not None:
            await _come_to(point, control)
            say(there=control.progress)
            if own_signal is not None:
                os.kill(os.getpid(), own_signal)
        await self._tell_outcome(control, before)

    async def _tell_outcome(self, control: swarmavg.StepControl, before: str) -> None:
        try:
            self._result = result = await control
        except swarmavg.SwarmError as error:
            say(error=type(error).__name__, text=str(error), unchanged=digest(self._tensor) == before)
            return
        say(
            group=sorted(result.values()),
            contributors=[[span.start, span.stop, [result[peer] for peer in peers]] for span, peers in result.contributors],
            fraction=result.fraction,
            excluded={str(result[peer]): str(exclusion) for peer, exclusion in result.excluded.items()},
            wrong=wrong_elements(self._tensor, result, self._rank),
            digest=digest(self._tensor),
            diverged=result.diverged,
            seconds=result.allreduce_seconds,
        )


async def _come_to(point: float, control: swarmavg.StepControl) -> None:
    while not control.done() and not (control.began_allreduce and control.progress >= point):
        await asyncio.sleep(0.0005)


def orders(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[str]:
    """The lines of standard input; an empty one at its end."""
    queue: asyncio.Queue[str] = asyncio.Queue()

    def listen() -> None:
        for line in itertools.chain(iter(sys.stdin.readline, ""), [""]):
            loop.call_soon_threadsafe(queue.put_nowait, line)

    threading.Thread(target=listen, daemon=True).start()
    return queue


async def main(rank: int, elements: int, token: str, bootstrap: str) -> None:
    queue = orders(asyncio.get_running_loop())
    peer = swarmavg.Peer(listen=["tcp://127.0.0.1:0"], bootstrap=[bootstrap] if bootstrap else [], token=token)
    async with peer, AsyncExitStack() as averagers:
        worker = Worker(rank, elements, peer, averagers)
        say(join_line=peer.join_line)
        while line := await queue.get():
            await worker.obey(json.loads(line))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
