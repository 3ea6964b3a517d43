"""Creating optimizer state in advance moves nothing: parameters, gradients, counters, schedules, hooks, random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swarmavg.training.core import TrainingCore
from swarmavg.training.settings import TrainingSettings

Factory = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Factory] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.3),
    "adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, weight_decay=0.3),
    "adam foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adam tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
    "sgd nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.2),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1, weight_decay=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1, weight_decay=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1, weight_decay=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1, weight_decay=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1, lambd=0.01, weight_decay=0.1),
}


def make_model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(5, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def initialized(optimizer: Optimizer, **arguments: Any) -> TrainingCore:
    return TrainingCore(TrainingSettings(optimizer=optimizer, initialize_optimizer=True, **arguments))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_moves(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [torch.full_like(parameter, 7.0) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    options = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    random_state = torch.get_rng_state()

    initialized(optimizer)

    assert all(torch.equal(*pair) for pair in zip(parameters, model.parameters(), strict=True))
    assert all(gradient is p.grad for gradient, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(gradient, torch.full_like(gradient, 7.0)) for gradient in gradients)
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == options
    assert torch.equal(random_state, torch.get_rng_state())
    for state in optimizer.state.values():
        assert float(state.get("step", 0)) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_as_without(name: str) -> None:
    plain, prepared = make_model(), make_model()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()), steps=5)
    optimizer = OPTIMIZERS[name](prepared.parameters())
    initialized(optimizer)
    got = train(prepared, optimizer, steps=5)
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "rmsprop", "nadam"])
def test_every_statistic_is_there_and_at_its_start(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    initialized(optimizer)
    assert set(optimizer.state) == set(model.parameters())
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            start = 1.0 if key == "mu_product" else 0.0
            assert torch.equal(value, torch.full_like(value, start)), key
            assert value.shape in {parameter.shape, torch.Size([])}


def test_hooks_do_not_fire() -> None:
    fired: list[str] = []
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    optimizer.register_step_post_hook(lambda *_: fired.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: fired.append("global post")),
    ]
    try:
        initialized(optimizer)
        assert fired == []
        optimizer.step()
        assert sorted(fired) == ["global post", "global pre", "post", "pre"]
    finally:
        for handle in handles:
            handle.remove()


def test_schedules_stand_still() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    before = copy.deepcopy(scheduler.state_dict())
    initialized(optimizer, scheduler=scheduler)
    assert scheduler.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_frozen_parameters_get_no_statistics() -> None:
    model = make_model()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    made = initialized(optimizer, average_opt_statistics=["exp_avg"])
    assert frozen not in optimizer.state
    assert [info.key for info in made.infos] == ["0", "1", "2", "3", "1.exp_avg", "2.exp_avg", "3.exp_avg"]


def test_existing_statistics_are_kept() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, steps=2)
    before = copy.deepcopy(optimizer.state_dict())
    TrainingCore(TrainingSettings(optimizer=optimizer))
    initialized(optimizer)
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in state.items())


def test_by_default_state_is_created_where_there_is_none() -> None:
    optimizer = OPTIMIZERS["adam"](make_model().parameters())
    TrainingCore(TrainingSettings(optimizer=optimizer))
    assert len(optimizer.state) == 4
    untouched = OPTIMIZERS["adam"](make_model().parameters())
    TrainingCore(TrainingSettings(optimizer=untouched, initialize_optimizer=False))
    assert len(untouched.state) == 0


def test_group_options_are_respected() -> None:
    model = make_model()
    optimizer = torch.optim.Rprop([{"params": model[0].parameters(), "lr": 0.25}, {"params": model[1].parameters()}], lr=0.5)  # type: ignore[index]
    initialized(optimizer)
    assert [float(optimizer.state[p]["step_size"].flatten()[0]) for p in model.parameters()] == [0.25, 0.25, 0.5, 0.5]


class Noisy(torch.optim.SGD):
    """A user's optimizer: counts its steps, draws random numbers, remembers the parameter it started from."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.steps_done = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps_done += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("start", parameter.detach().clone())
                parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


def test_a_users_own_optimizer() -> None:
    model = make_model()
    optimizer = Noisy(model.parameters())
    random_state = torch.get_rng_state()
    initialized(optimizer, average_opt_statistics=["start"])
    assert optimizer.steps_done == 0
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(optimizer.state[p]["start"], p) for p in model.parameters())


def test_an_optimizer_that_cannot_step_on_zero_gradients_says_so() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ValueError, match=r"initialize_optimizer.*SparseAdam.*initialize_optimizer=False"):
        TrainingCore(TrainingSettings(optimizer=torch.optim.SparseAdam(table.parameters())))
