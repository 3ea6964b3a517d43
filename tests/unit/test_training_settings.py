"""Constructor and call checks of the training averager: each refuses by the argument's name and value."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from swarmavg.training.core import TrainingCore
from swarmavg.training.settings import StepCall, TrainingSettings, refuse_tensor_infos


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def core(**arguments: Any) -> TrainingCore:
    if "optimizer" not in arguments:
        arguments["optimizer"] = torch.optim.Adam(make_model().parameters(), lr=0.1)
    return TrainingCore(TrainingSettings(**arguments))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": 3}, TypeError, "optimizer.*3"),
        ({"optimizer": adam}, ValueError, "params.*callable"),
        ({"optimizer": lambda params: 7, "params": [torch.zeros(2)]}, TypeError, "optimizer.*7"),
        ({"params": torch.zeros(3)}, TypeError, "params.*one tensor"),
        ({"params": []}, ValueError, "params.*at least one"),
        ({"params": [1.5]}, TypeError, r"params\[0\].*1.5"),
        ({"params": [torch.zeros(2, dtype=torch.int64)]}, ValueError, r"params\[0\].*int64"),
        ({"params": [torch.zeros(2, dtype=torch.complex64)]}, ValueError, r"params\[0\].*complex64"),
        ({"params": [torch.zeros(2, requires_grad=True) * 2]}, ValueError, r"params\[0\].*leaf"),
        ({"params": [torch.zeros(2, device="meta")]}, ValueError, r"params\[0\].*meta"),
        ({"params": [{"lr": 1.0}]}, ValueError, "params.*without 'params'"),
        ({"params": [torch.zeros(2)]}, ValueError, r"params\[0\] is not one"),
        ({"scheduler": 3}, TypeError, "scheduler.*3"),
        ({"scheduler": lambda optimizer: optimizer}, TypeError, "scheduler must return"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, ValueError, "ReduceLROnPlateau.*metrics"),
        ({"initialize_optimizer": "no"}, TypeError, "initialize_optimizer.*'no'"),
        ({"reuse_tensors": 1}, TypeError, "reuse_tensors.*1"),
        ({"offload_optimizer": True}, ValueError, "offload_optimizer=True.*callable"),
        ({"offload_optimizer": True, "optimizer": adam, "params": [torch.zeros(2)]}, NotImplementedError, "offload_optimizer"),
        ({"delta_rule_averaging": True, "reuse_tensors": True}, ValueError, "delta_rule_averaging.*reuse_tensors"),
        ({"parameter_names": ["a", "b"]}, ValueError, "parameter_names has 2 names for 4"),
        ({"parameter_names": ["a", "b", "a", "c"]}, ValueError, r"parameter_names.*\['a'\]"),
        ({"parameter_names": "abcd"}, TypeError, "parameter_names.*'abcd'"),
        ({"parameter_names": [1, 2, 3, 4]}, TypeError, "parameter_names.*1"),
        ({"average_opt_statistics": "exp_avg"}, TypeError, "average_opt_statistics.*'exp_avg'"),
        ({"average_opt_statistics": ["momentum"]}, ValueError, "'momentum'.*known: exp_avg, exp_avg_sq, step"),
        (
            {"average_opt_statistics": ["exp_avg"], "initialize_optimizer": False},
            ValueError,
            "'exp_avg'.*initialize_optimizer",
        ),
        ({"extra_tensors": torch.zeros(2)}, TypeError, "extra_tensors.*sequence of tensors"),
        ({"extra_tensors": [2.0]}, TypeError, r"extra_tensors\[0\].*2.0"),
        ({"extra_tensors": [torch.zeros(2, dtype=torch.complex64)]}, ValueError, r"extra_tensors\[0\].*complex64"),
        ({"extra_tensors": [torch.zeros(2).to_sparse()]}, ValueError, r"extra_tensors\[0\].*sparse"),
        ({"on_averaging_failure": "ignore"}, ValueError, "on_averaging_failure.*'ignore'"),
        ({"status_loglevel": "loud"}, ValueError, "status_loglevel.*'loud'"),
        ({"status_loglevel": None}, ValueError, "status_loglevel.*None"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        core(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer_step": 1}, TypeError, "optimizer_step.*1"),
        ({"wait_for_delayed_update": "yes"}, TypeError, "wait_for_delayed_update.*'yes'"),
        ({"delay_optimizer_step": True}, ValueError, "delay_optimizer_step.*offload_optimizer"),
        ({"delay_optimizer_step": True, "delay_averaging": False}, ValueError, "delay_optimizer_step.*delay_averaging"),
        ({"delay_optimizer_step": True, "grad_scaler": object()}, ValueError, "delay_optimizer_step.*grad_scaler"),
        ({"grad_scaler": object()}, ValueError, "grad_scaler.*optimizer_step"),
        ({"grad_scaler": object(), "optimizer_step": True}, NotImplementedError, "grad_scaler"),
        ({"delay_averaging": True}, ValueError, "delay_averaging=True.*averaging_round"),
        ({"averaging_round": True, "averaging_opts": 5}, TypeError, "averaging_opts.*5"),
        ({"averaging_round": True, "averaging_opts": {"wait": False}}, ValueError, "wait=False.*averaging_opts"),
        (
            {"averaging_round": True, "averaging_opts": {"require_trigger": True}},
            ValueError,
            "require_trigger=True.*averaging_opts",
        ),
        ({"averaging_round": True, "averaging_opts": {"wheight": 2}}, TypeError, "wheight=2.*known: .*weight"),
        ({"averaging_round": True, "averaging_opts": {"weight": -1}}, ValueError, "weight.*-1"),
        ({"averaging_round": True, "averaging_opts": {"timeout": 0}}, ValueError, "timeout.*0"),
    ],
)
def test_bad_calls_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        StepCall(**arguments)


def test_options_for_a_round_that_does_not_happen_warn() -> None:
    with pytest.warns(UserWarning, match="averaging_opts.*averaging_round"):
        StepCall(averaging_opts={"weight": 2.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reuse_tensors": True, "offload_optimizer": True}, "offload_optimizer=True has no effect.*reuse_tensors"),
        ({"custom_gradients": True}, "custom_gradients=True has no effect"),
    ],
)
def test_switches_without_effect_warn(arguments: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        core(**arguments)


def test_tensor_infos_cannot_be_given() -> None:
    with pytest.raises(TypeError, match="tensor_infos"):
        refuse_tensor_infos({"tensor_infos": []})


def test_duplicate_parameters_are_refused() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"params\[0\] and params\[1\]"):
        core(optimizer=adam, params=[tensor, tensor])


def test_an_optimizer_may_be_made_from_tensors_groups_pairs_or_generators() -> None:
    model = make_model()
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]  # type: ignore[index]
    assert len(core(optimizer=adam, params=model.parameters()).parameters) == 4
    grouped = core(optimizer=adam, params=[{"params": (w for w in weights), "lr": 0.5}, {"params": biases}])
    assert [group["lr"] for group in grouped.optimizer.param_groups] == [0.5, 0.1]
    assert len(grouped.parameters) == 4
    named = core(optimizer=adam, params=list(model.named_parameters()))
    assert named.parameter_names == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_params_must_be_the_optimizers_own_group_by_group() -> None:
    model = make_model()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)  # type: ignore[index]
    own = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]  # type: ignore[index]
    assert core(optimizer=optimizer, params=own).parameters == tuple(model.parameters())
    assert core(optimizer=optimizer, params=reversed(list(model.parameters()))).parameters[0] is model[1].bias  # type: ignore[index]
    with pytest.raises(ValueError, match="params group 0"):
        core(optimizer=optimizer, params=own[::-1])
    with pytest.raises(ValueError, match="params has 1 groups, optimizer has 2"):
        core(optimizer=optimizer, params=own[:1])
    with pytest.raises(ValueError, match="2 of the optimizer's 4"):
        core(optimizer=optimizer, params=list(model[0].parameters()))  # type: ignore[index]


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBFGS.*closure"):
        core(optimizer=torch.optim.LBFGS(make_model().parameters()))


def test_a_scheduler_must_belong_to_the_optimizer() -> None:
    mine, other = (torch.optim.SGD(make_model().parameters(), lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="StepLR is bound to another optimizer"):
        core(optimizer=mine, scheduler=lr_scheduler.StepLR(other, 1))
    with pytest.raises(ValueError, match=r"scheduler must be a callable.*StepLR"):
        core(optimizer=adam, params=make_model().parameters(), scheduler=lr_scheduler.StepLR(other, 1))
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        core(optimizer=mine, scheduler=lr_scheduler.ReduceLROnPlateau(mine))
    made = core(optimizer=adam, params=make_model().parameters(), scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1))
    assert made.scheduler is not None
    assert made.scheduler.optimizer is made.optimizer


def test_integer_extras_are_kept_out_of_averaging_and_named_once() -> None:
    norm = nn.BatchNorm1d(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = core(extra_tensors=list(norm.buffers()))
    assert [str(w.message) for w in caught if "extra_tensors[2]" in str(w.message)] == [
        "tensors that are not of a floating-point dtype are not averaged, only shared: extra_tensors[2] (torch.int64)"
    ]
    assert list(made.shared_only) == ["extra_tensors[2]"]
    assert [info.key for info in made.infos[4:]] == ["extra_tensors[0]", "extra_tensors[1]"]


def test_an_extra_tensor_that_is_averaged_already_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"extra_tensors\[1\] is the same tensor as params\[0\]"):
        core(optimizer=optimizer, extra_tensors=[torch.zeros(1), model[0].weight])  # type: ignore[index]
    twice = torch.zeros(1)
    with pytest.raises(ValueError, match=r"extra_tensors\[1\] is the same tensor as extra_tensors\[0\]"):
        core(optimizer=optimizer, extra_tensors=[twice, twice])


def test_tensors_that_cannot_be_averaged_in_place_are_refused() -> None:
    half = [torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]
    with pytest.raises(ValueError, match=r"reuse_tensors=True.*'0' is torch.bfloat16"):
        core(optimizer=adam, params=half, reuse_tensors=True)


def test_tensors_are_described_by_name_and_role() -> None:
    def keys() -> Iterator[tuple[str, str]]:
        made = core(parameter_names=["a", "b", "c", "d"], average_opt_statistics=["exp_avg_sq"], extra_tensors=[torch.zeros(5)])
        return ((info.key, info.role.value) for info in made.infos)

    assert list(keys()) == [
        *((name, "parameter") for name in "abcd"),
        *((f"{name}.exp_avg_sq", "optimizer") for name in "abcd"),
        ("extra_tensors[0]", "unspecified"),
    ]
