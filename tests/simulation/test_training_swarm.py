"""Training averagers of several peers in virtual time: what they hold after rounds with one another."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from swarmavg.errors import ClosedError, MatchmakingError
from swarmavg.testing.clock import run_virtual
from swarmavg.testing.network import SimulatedSwarm
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.state_averager import TrainingStateAverager


class Peers:
    """Training averagers on peers of their own."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self.swarm = SimulatedSwarm()
        self.averagers: list[TrainingStateAverager] = []

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.swarm)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def add(self, *, client_mode: bool = False, **arguments: Any) -> TrainingStateAverager:
        peer = await self.swarm.peer(client_mode=client_mode)
        averager = TrainingStateAverager(peer=peer, prefix="run", **arguments)
        self.averagers.append(await self._stack.enter_async_context(averager))
        return averager

    async def step(self, **arguments: Any) -> list[TrainingStepResult]:
        """All step together."""
        results = await asyncio.gather(*(averager.step(**arguments) for averager in self.averagers))
        return [result for result in results if result is not None]


def linear(seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(5, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def pull_to(model: nn.Linear, target: float) -> None:
    """Gradients of the squared distance of every element to `target`."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() - target


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.detach().double() for tensor in tensors]).mean(0)


def assert_mean(got: torch.Tensor, before: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(got.detach().double(), mean(before), rtol=1e-6, atol=1e-6)


def assert_identical(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors[1:]:
        assert torch.equal(tensor, tensors[0])


def adam_at(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=rate, betas=(0.9, 0.9))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("sync_epoch", [False, True])
def test_peers_trained_apart_agree_after_a_round(reuse: bool, sync_epoch: bool) -> None:
    async def main() -> None:
        models = [linear(seed) for seed in range(2)]
        extras = [torch.full((4,), float(seed)) for seed in range(2)]
        async with Peers() as peers:
            for model, extra in zip(models, extras, strict=True):
                await peers.add(
                    optimizer=adam_at(0.1),
                    params=model.parameters(),
                    scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (2**epoch)),
                    average_opt_statistics=["exp_avg_sq"],
                    extra_tensors=[extra],
                    reuse_tensors=reuse,
                    sync_epoch_when_averaging=sync_epoch,
                    target_group_size=2,
                )
            first, second = peers.averagers
            for number in range(20):
                for averager, model, target in zip(peers.averagers, models, (1.0, -3.0), strict=True):
                    pull_to(model, target)
                    last = number in (9, 19) and averager is first
                    await averager.step(optimizer_step=True, zero_grad=True, increment_epoch=last)
            states = [averager.optimizer.state[model.weight] for averager, model in zip(peers.averagers, models, strict=True)]
            squares = [state["exp_avg_sq"].clone() for state in states]
            momenta = [state["exp_avg"].clone() for state in states]
            weights = [model.weight.detach().clone() for model in models]
            assert not torch.equal(*weights)

            results = await peers.step(averaging_round=True, averaging_opts={"gather": "hello"})

            assert_identical([model.weight for model in models])
            assert_identical([model.bias for model in models])
            assert_identical(extras)
            assert_mean(models[0].weight, weights)
            assert extras[0].tolist() == [0.5] * 4
            for state, momentum in zip(states, momenta, strict=True):
                assert_mean(state["exp_avg_sq"], squares)
                assert torch.equal(state["exp_avg"], momentum)
                assert state["step"] == 20
            for result in results:
                assert dict(result) == {first.peer_id: "hello", second.peer_id: "hello"}
                assert result.epochs == {first.peer_id: 2, second.peer_id: 0}
            assert (first.local_epoch, second.local_epoch) == (2, 2 if sync_epoch else 0)
            rates = [averager.optimizer.param_groups[0]["lr"] for averager in peers.averagers]
            assert rates == pytest.approx([0.025, 0.025 if sync_epoch else 0.1])

    run_virtual(main)


def test_weights_count() -> None:
    async def main() -> None:
        models = [linear(seed) for seed in range(3)]
        before = [model.weight.detach().clone() for model in models]
        async with Peers() as peers:
            for model in models:
                await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_group_size=3)
            weights = (1.0, 2.0, 0.0)
            await asyncio.gather(
                *(
                    averager.step(averaging_round=True, averaging_opts={"weight": weight})
                    for averager, weight in zip(peers.averagers, weights, strict=True)
                )
            )
            assert_identical([model.weight for model in models])
            torch.testing.assert_close(models[2].weight, (before[0] + 2 * before[1]) / 3, rtol=1e-6, atol=1e-6)

    run_virtual(main)


def test_models_of_any_float_dtype_meet_in_float32() -> None:
    async def main() -> None:
        models = [linear(0).to(torch.bfloat16), linear(1).to(torch.float16), linear(2)]
        before = [model.weight.detach().clone() for model in models]
        async with Peers() as peers:
            for model in models:
                await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_group_size=3)
            await peers.step(averaging_round=True)
            assert_mean(models[2].weight, before)
            for model in models[:2]:
                assert torch.equal(model.weight, models[2].weight.to(model.weight.dtype))

    run_virtual(main)


def test_an_auxiliary_peer_and_a_client_take_part() -> None:
    async def main() -> None:
        models = [linear(seed) for seed in range(3)]
        before = [model.weight.detach().clone() for model in models]
        async with Peers() as peers:
            for model, role in zip(models, ({}, {"client_mode": True}, {"auxiliary": True}), strict=True):
                await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_group_size=3, **role)
            results = await peers.step(averaging_round=True)
            assert len(results) == 3
            assert_mean(models[0].weight, before[:2])
            assert_identical([model.weight for model in models[:2]])
            assert torch.equal(models[2].weight, before[2])

    run_virtual(main)


@pytest.mark.parametrize("delta", [False, True])
def test_local_steps_during_a_delayed_round(delta: bool) -> None:
    async def main() -> None:
        models = [linear(seed) for seed in range(2)]
        before = [model.weight.detach().clone() for model in models]
        async with Peers() as peers:
            for model in models:
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                await peers.add(optimizer=optimizer, delta_rule_averaging=delta, target_group_size=2)
            assert await peers.step(averaging_round=True, delay_averaging=True) == []
            for _ in range(5):
                for averager, model in zip(peers.averagers, models, strict=True):
                    model.weight.grad = torch.full_like(model.weight, -1.0)
                    assert await averager.step(optimizer_step=True, zero_grad=True, wait_for_delayed_update=False) is None
            moved = [model.weight.detach().clone() for model in models]
            results = await peers.step(wait_for_delayed_update=True)
            assert len(results) == 2
            average = mean(before).float()
            for model, was, now in zip(models, before, moved, strict=True):
                expected = average + (now - was) if delta else average
                torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-5)

    run_virtual(main)


def test_a_lone_peer_trains_on_and_says_why_it_is_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        model = linear(0)
        options: dict[str, Any] = {"averaging_opts": {"timeout": 2.0}, "averaging_round": True}
        async with Peers() as peers:
            averager = await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
            pull_to(model, 2.0)
            with caplog.at_level(logging.WARNING, logger="swarmavg"):
                assert await averager.step(optimizer_step=True, **options) is None
            torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, 2.0))
            assert "averaging round failed" in caplog.text
        async with Peers() as peers:
            strict = await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0), on_averaging_failure="raise")
            with pytest.raises(MatchmakingError):
                await strict.step(**options)

    run_virtual(main)


def test_closing_during_a_delayed_round_leaves_no_task() -> None:
    async def main() -> None:
        model = linear(0)
        before = model.weight.detach().clone()
        async with Peers() as peers:
            averager = await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
            await averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": math.inf})
            await asyncio.sleep(1)
        assert torch.equal(model.weight, before)

    run_virtual(main)


def test_a_delayed_round_ended_by_its_peer_is_told_by_the_next_step() -> None:
    async def main() -> None:
        model = linear(0)
        async with Peers() as peers:
            averager = await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
            await averager.step(averaging_round=True, delay_averaging=True, averaging_opts={"timeout": math.inf})
            await asyncio.sleep(1)
            await averager.peer.aclose()
            with pytest.raises(ClosedError):
                await averager.step(optimizer_step=True)

    run_virtual(main)


def test_a_cancelled_round_leaves_model_and_swarm_usable() -> None:
    async def main() -> None:
        models = [linear(seed) for seed in range(2)]
        before = [model.weight.detach().clone() for model in models]
        async with Peers() as peers:
            for model in models:
                await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0), target_group_size=2)
            lone = asyncio.create_task(peers.averagers[0].step(averaging_round=True))
            await asyncio.sleep(0.5)
            lone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lone
            assert torch.equal(models[0].weight, before[0])
            await peers.step(averaging_round=True)
            assert_mean(models[0].weight, before)
            assert_identical([model.weight for model in models])

    run_virtual(main)


def test_group_bits_are_those_of_the_averager() -> None:
    async def main() -> None:
        model = linear(0)
        async with Peers() as peers:
            averager = await peers.add(optimizer=torch.optim.SGD(model.parameters(), lr=1.0), initial_group_bits="01")
            assert averager.get_group_bits() == "01"
            averager.set_group_bits("10")
            assert averager.averager.get_group_bits() == "10"

    run_virtual(main)
