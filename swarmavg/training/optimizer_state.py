"""The optimizer's statistics: which there are, and how to create them all before the first step without moving anything."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

COUNTERS_AT_START = {"step": 0.0, "mu_product": 1.0}
"""Entries of a parameter's state that count steps, and their value before the first (`mu_product` is NAdam's)."""

DECAYS = ("weight_decay", "lambd")
"""Hyper-parameters by which torch's optimizers let a parameter's value into its statistics even when the gradient is zero."""


def has_state_tensors(optimizer: Optimizer) -> bool:
    return any(_tensors_in(state) for state in optimizer.state.values())


def find_statistics(optimizer: Optimizer, parameters: Sequence[torch.Tensor], wanted: Sequence[str]) -> list[tuple[int, str]]:
    """Where the wanted statistics are: (index of the parameter, name), by name, then by parameter.

    Parameters without the statistic, such as frozen ones, are left out. Raises `ValueError` for a name that no parameter has.
    """
    found = []
    for name in wanted:
        places = [index for index, parameter in enumerate(parameters) if name in _averageable(optimizer, parameter)]
        if not places:
            raise ValueError(f"average_opt_statistics names {name!r}, which {_known_statistics(optimizer, parameters)}")
        found += [(index, name) for index in places]
    return found


def create_statistics(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give every trained parameter that has no state yet the one that a step on a zero gradient creates.

    The step is made by a twin of the optimizer on copies, one parameter at a time, without decay: parameters, gradients,
    hyper-parameters, hooks and random number generators are not involved, and step counters start where they would have.
    """
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    new = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    with torch.random.fork_rng(devices=_cuda_devices(new)):
        for parameter in new:
            state = _state_after_zero_step(optimizer, group_of[id(parameter)], parameter)
            if state:
                optimizer.state[parameter] = state


def _state_after_zero_step(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    stand_in = parameter.detach().clone().requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    twin = _twin(optimizer, {**_still(group), "params": [stand_in]})
    # torch wraps the `step` of every optimizer class to run hooks, also global ones; what it wrapped runs none
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    try:
        with torch.no_grad():
            step(twin)
    except Exception as error:
        raise ValueError(
            f"initialize_optimizer: {type(optimizer).__name__} cannot make a step on zero gradients ({error}); "
            "pass initialize_optimizer=False"
        ) from error
    state = dict(twin.state.get(stand_in, {}))
    _reset_counters(state)
    return state


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class with one group, no state and no hooks, made as unpickling makes one.

    What a subclass keeps in attributes of its own is shared with the original.
    """
    twin = type(optimizer).__new__(type(optimizer))
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": [group]})
    for name, value in vars(optimizer).items():
        vars(twin).setdefault(name, value)
    return twin


def _still(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group's hyper-parameters, without names and without decay."""
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {**options, **{key: 0.0 for key in DECAYS if key in options}}


def _reset_counters(state: dict[str, Any]) -> None:
    for name, start in COUNTERS_AT_START.items():
        value = state.get(name)
        if isinstance(value, torch.Tensor):
            value.fill_(start)
        elif value is not None:
            state[name] = type(value)(start)


def _tensors_in(state: Any) -> dict[str, torch.Tensor]:
    items = state.items() if isinstance(state, dict) else ()
    return {name: value for name, value in items if isinstance(name, str) and isinstance(value, torch.Tensor)}


def _averageable(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    tensors = _tensors_in(optimizer.state.get(parameter))
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _known_statistics(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> str:
    known = sorted({name for parameter in parameters for name in _averageable(optimizer, parameter)})
    if known:
        return f"{type(optimizer).__name__} does not keep; known: {', '.join(known)}"
    return f"{type(optimizer).__name__} does not have: it keeps none, or none yet (see initialize_optimizer)"


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> list[int]:
    indices = {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    return sorted(indices)
