"""Members that die, freeze, leave or are cut off in mid-round: who takes over, who is out, and what the others then hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmavg import AllreduceError, ExclusionCode, FencedError, StepResult, SwarmError
from swarmavg.compression import Float16Compression
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.faults import FaultPlan
from swarmavg.testing.message_watch import MessageSeen
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.testing.processes import ProcessKilledError

PART = 64
"""Elements per part of 256 bytes."""
SETTINGS: dict[str, Any] = {
    "part_size_bytes": 256,
    "min_matchmaking_time": 2.0,
    "request_timeout": 0.5,
    "sender_timeout": 1.0,
    "reducer_timeout": 2.0,
}
NOTICED = 6.0
"""Virtual seconds: more than it takes to notice any trouble and to go on, less than any timeout of a step here."""


def whole_numbers(count, size):
    """Per peer, numbers whose means over any one to five peers are whole: float32 holds sums and means exactly."""
    generator = torch.Generator().manual_seed(count)
    return [[60.0 * torch.randint(-500, 500, (size,), generator=generator).float()] for _ in range(count)]


class Scene:
    """Some averagers that step once, what happens to them on the way, and what came of it."""

    def __init__(self, roles: str, *, parts: int = 1, weights=None, tensors=None, **settings: Any) -> None:
        self.roles = [{"n": "node", "c": "client", "a": "auxiliary"}[letter] for letter in roles]
        reducers = sum(letter != "c" for letter in roles)
        self.each = tensors or whole_numbers(len(roles), reducers * parts * PART)
        self.before = [[tensor.clone() for tensor in tensors] for tensors in self.each]
        self.weights = weights or [1.0] * len(roles)
        self.settings = {**SETTINGS, "target_group_size": len(roles), **settings}
        self.outcomes: list[StepResult | BaseException] = []
        self.ended: dict[int, float] = {}
        self.leader: int | None = None

    async def __aenter__(self):
        self.swarm = await SimulatedSwarm(seed=len(self.each)).__aenter__()
        self.watch = self.swarm.messages
        self.when(lambda message: message.content == "begin", self._led_by)
        self.averagers = await self.swarm.averagers(self.each, roles=self.roles, **self.settings)
        return self

    async def __aexit__(self, *details):
        await self.swarm.__aexit__(*details)

    def _led_by(self, message: MessageSeen) -> None:
        self.leader = self.number(message.source)

    def number(self, peer_id) -> int:
        return self.swarm.ids.index(peer_id)

    def when(self, chosen: Callable[[MessageSeen], bool], act: Callable[[MessageSeen], Any], moment: str = "sent") -> None:
        """Act once, at the first chosen message: as it is about to be sent, when it is on its way, or when it was read."""
        listeners = {"sending": self.watch.on_sending, "sent": self.watch.on_sent, "received": self.watch.on_received}[moment]

        def listen(message: MessageSeen) -> None:
            if chosen(message):
                listeners.remove(listen)
                act(message)

        listeners.append(listen)

    async def step(self, **options: Any):
        """All of them step; afterwards the round is really over for everybody."""
        began = asyncio.get_running_loop().time()

        async def one(number):
            weight = None if self.roles[number] == "auxiliary" else self.weights[number]
            try:
                return await self.swarm.step(number, weight=weight, timeout=60, **options)
            finally:
                self.ended[number] = asyncio.get_running_loop().time() - began

        tasks = [one(number) for number in range(len(self.each))]
        self.outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(30)

    # what came of it

    def result(self, number) -> StepResult:
        outcome = self.outcomes[number]
        assert isinstance(outcome, StepResult), outcome
        return outcome

    def contributors(self, number) -> list[tuple[int, int, set[int]]]:
        """Who is in the average of which elements."""
        return [
            (span.start, span.stop, {self.number(peer) for peer in peers}) for span, peers in self.result(number).contributors
        ]

    def check(self, *survivors, outs=(), within=NOTICED):
        """These, and of the others nobody, have a result: exactly the mean over whom it names, and the same bits for all."""
        for number, outcome in enumerate(self.outcomes):
            assert isinstance(outcome, StepResult) == (number in survivors), f"{number}: {outcome!r}"
        for number in survivors:
            result = self.result(number)
            assert not result.diverged
            assert result.attempts == 1
            assert self.ended[number] < within
            assert {self.number(peer) for peer in result.excluded} <= set(outs)
            if self.roles[number] == "auxiliary":
                continue
            assert result.fraction == 1.0
            assert result.missing == []
            self._check_values(number)
            first = next(each for each in survivors if self.roles[each] != "auxiliary")
            assert self.contributors(number) == self.contributors(first)
            assert torch.equal(self.each[number][0], self.each[first][0])
        for number in set(range(len(self.each))) - set(survivors):
            if not isinstance(self.outcomes[number], ProcessKilledError):
                self.check_unchanged(number)

    def _check_values(self, number):
        alpha = self.settings.get("averaging_alpha", 1.0)
        at = 0
        for start, stop, members in self.contributors(number):
            assert start == at
            at = stop
            total = sum(self.weights[member] for member in members)
            parts = [self.weights[member] * self.before[member][0][start:stop].double() for member in sorted(members)]
            local = self.before[number][0][start:stop].double()
            expected = (local + alpha * (sum(parts) / total - local)).float()
            if self.settings.get("compression") is None:
                assert torch.equal(self.each[number][0][start:stop], expected)
            else:
                torch.testing.assert_close(self.each[number][0][start:stop], expected, rtol=2e-3, atol=1e-6)
        assert at == self.each[number][0].numel()

    def check_unchanged(self, number):
        assert torch.equal(self.each[number][0], self.before[number][0])

    def story(self, number) -> str:
        return self.averagers[number].story(self.result(number).round_id)

    def name(self, number) -> str:
        return self.swarm.ids[number].short


def is_result(message):
    return message.is_result


# ---- a reducer dies


def test_a_result_that_had_reached_one_of_three_is_passed_on_with_the_dead_in_it():
    async def main():
        async with Scene("nnnn") as scene:
            died = []

            def kill(message):
                scene.swarm.kill(message.source)
                died.extend([scene.number(message.source), scene.number(message.target)])

            scene.when(lambda m: m.is_result and m.source != scene.swarm.ids[scene.leader], kill_first(scene, kill))
            await scene.step()
            victim, holder = died
            survivors = {0, 1, 2, 3} - {victim}
            scene.check(*survivors, outs=[victim])
            assert any(members == {0, 1, 2, 3} for _, _, members in scene.contributors(holder))
            print(scene.story(holder))

    run_virtual(main)


def kill_first(scene, kill):
    return kill
