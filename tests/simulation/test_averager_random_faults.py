"""Averagers among random faults, against an oracle that knows only the events; every seed replays exactly."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from typing import Any

import pytest
import torch

from swarmavg import SwarmError
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm

GRACE = 0.3
"""Virtual seconds beyond its timeout that a step may take to end."""


def now():
    return asyncio.get_running_loop().time()


async def until(condition):
    """Wait, in small virtual steps, until something holds; a test that waits for ever fails by its time limit."""
    while not condition():
        await asyncio.sleep(0.001)


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


# ---- random faults, checked against what the event log says


class Abused:
    """One averager and a user that steps it in all ways; what happened is kept for the oracle."""

    def __init__(self, averager, tensors, rng, log):
        self.averager, self.tensors, self.rng, self.log = averager, tensors, rng, log

    async def live(self, steps):
        for number in range(steps):
            if self.averager.peer.running:
                await self.one_step(number)
            await asyncio.sleep(self.rng.choice([0, self.rng.random()]))

    async def one_step(self, number):
        for tensor in self.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(self.rng.randrange(1 << 30))))
        before = [tensor.clone() for tensor in self.tensors]
        auxiliary = self.averager.config.auxiliary
        weight = 0.0 if auxiliary else self.rng.choice([1.0, 0.0, 2.5, 1e-3, 1e18])
        self.log.inputs[self.averager.peer_id, number] = (weight, flat(before))
        timeout = self.rng.choice([3.0, 8.0, 20.0])
        how = self.rng.choice([self.plainly, self.cancelling, self.with_a_timeout, self.triggering, self.holding])
        began = now()
        ended = []
        try:
            control = await self.averager.step(
                gather=number,
                weight=None if auxiliary else weight,
                timeout=timeout,
                allow_retries=self.rng.random() < 0.7,
                require_trigger=how == self.triggering,
                wait=False,
            )
            control._task.add_done_callback(lambda _: ended.append(now() - began))
            result = await how(control, timeout)
        except (SwarmError, TimeoutError, asyncio.CancelledError):
            control.cancel()
            await until(control.done)
            if control.cancelled() or control._task.exception() is not None:
                assert all(torch.equal(a, b) for a, b in zip(before, self.tensors, strict=True))
        else:
            self.log.results.append((number, result, before, [tensor.clone() for tensor in self.tensors], auxiliary))
        await until(lambda: ended)
        assert ended[0] <= timeout + GRACE

    async def plainly(self, control, timeout):
        del timeout
        return await control

    async def cancelling(self, control, timeout):
        for _ in range(self.rng.randint(1, 3)):
            await asyncio.sleep(self.rng.choice([0.0, self.rng.random() * 0.2, self.rng.random() * timeout / 3]))
            control.cancel()
        return await control

    async def with_a_timeout(self, control, timeout):
        async with asyncio.timeout(self.rng.random() * timeout):
            return await control

    async def triggering(self, control, timeout):
        await asyncio.sleep(self.rng.random() * timeout * 1.1)
        control.allow_allreduce()
        return await control

    async def holding(self, control, timeout):
        await asyncio.sleep(self.rng.random())
        async with self.averager.get_tensors():
            await asyncio.sleep(self.rng.random() * timeout * 1.2)
        return await control


class EventLog:
    """What every step began with and ended with. The oracle knows nothing else."""

    def __init__(self):
        self.inputs = {}
        self.results = []

    def check(self):
        agreed: dict[Any, torch.Tensor] = {}
        for _, result, before, after, auxiliary in self.results:
            local, ended = flat(before), flat(after)
            if auxiliary:
                assert torch.equal(local, ended)
                continue
            covered = torch.zeros_like(local)
            for span in result.missing:
                covered[span.start : span.stop] += 1
                assert torch.equal(local[span.start : span.stop], ended[span.start : span.stop])
            for span, members in result.contributors:
                here = slice(span.start, span.stop)
                covered[here] += 1
                expected = local[here] if not members else self.mean(result, members)[here]
                torch.testing.assert_close(ended[here], expected, rtol=1e-5, atol=1e-5)
                if members:
                    first = agreed.setdefault((result.round_id, span, members), ended[here])
                    assert torch.equal(first, ended[here])
            assert covered.eq(1).all()

    def mean(self, result, members):
        given = [self.inputs[member, result[member]] for member in members]
        total = sum(weight for weight, _ in given)
        assert all(weight > 0 for weight, _ in given)
        return sum(values * (weight / total) for weight, values in given)


async def chaos(swarm, rng):
    """Now and then something happens to a peer or a link."""
    ids = [peer.id for peer in swarm.peers]
    for _ in range(rng.choice([0, 2, 6])):
        await asyncio.sleep(rng.random() * rng.choice([0.3, 3.0, 10.0]))
        a, b = rng.sample(ids, 2)
        what = rng.choice(["kill", "cut", "cut", "heal", "close", "slow"])
        if what == "slow":
            swarm.network.set_link(a, b, bandwidth=2e4, latency=rng.random())
        elif what == "close":
            began = now()
            await rng.choice(swarm.peers).aclose()
            assert now() - began < 8
        elif what == "kill":
            swarm.network.kill(a)
        else:
            (swarm.network.cut if what == "cut" else swarm.network.heal)(a, b)


async def one_random_swarm(seed):
    rng = random.Random(seed)
    log, complaints = EventLog(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    count = rng.randint(2, 5)
    options: dict[str, Any] = {
        "target_group_size": rng.choice([None, 2, 3]),
        "part_size_bytes": rng.choice([64, 1024]),
        "sender_timeout": rng.choice([None, 1.0, 0.05]),
        "allreduce_timeout": rng.choice([None, None, 1.0]),
        "min_vector_size": rng.choice([0, 10, 10**9]),
        "min_matchmaking_time": 2.0,
        "request_timeout": 0.5,
    }
    settings: dict[str, Any] = {"latency": rng.choice([0.0, 0.01, 0.1]), "bandwidth": rng.choice([None, 1e5])}
    async with SimulatedSwarm(seed=seed, directory=rng.choice(["shared", "gossip"]), **settings) as swarm:
        users = []
        shapes = [(rng.choice([1, 7, 2001]),), (), (0,), (3, 5)]
        for _ in range(count):
            role: Any = rng.choices(["node", "client", "auxiliary"], [6, 2, 1])[0]
            tensors = [torch.zeros(shape) for shape in shapes]
            bandwidth = rng.choice([None, None, 0.0, 1.0, 1e300, 1e-300])
            averager = await swarm.averager(tensors, role=role, bandwidth=bandwidth, **options)
            users.append(Abused(averager, tensors, random.Random(rng.random()), log))
        faults = asyncio.create_task(chaos(swarm, rng))
        async with asyncio.TaskGroup() as lives:
            for user in users:
                lives.create_task(user.live(3))
        await faults
        for peer in swarm.peers:
            for other in swarm.peers:
                if peer is not other:
                    swarm.network.heal(peer.id, other.id)
    log.check()
    assert complaints == []


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_steps_end_in_time_and_tensors_hold_what_the_results_say(seed, caplog):
    run_virtual(lambda: one_random_swarm(seed))
    gc.collect()
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


# ---- locks and tensors
