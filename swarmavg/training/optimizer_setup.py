"""The optimizer that is trained and the parameters in the user's order, with every check the constructor makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from swarmavg.training.settings import Params, TrainingSettings


@dataclass(frozen=True, slots=True, eq=False)
class OptimizedParameters:
    """An optimizer and its parameters, each with its name, in the order that all peers share."""

    optimizer: Optimizer
    parameters: tuple[torch.Tensor, ...]
    names: tuple[str, ...]

    def check_unchanged(self) -> None:
        """Raises `ValueError` unless the optimizer still trains these very parameters."""
        own = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(own) != len(self.parameters):
            raise ValueError(
                f"optimizer has {len(own)} parameters, but had {len(self.parameters)} when the averager was made: "
                "make a new averager after add_param_group"
            )
        known = {id(parameter) for parameter in self.parameters}
        if any(id(parameter) not in known for parameter in own):
            raise ValueError("optimizer has other parameters than when the averager was made: make a new averager for them")


def set_up_optimizer(settings: TrainingSettings) -> OptimizedParameters:
    """Make or adopt the optimizer. Raises `ValueError` or `TypeError` naming the argument that does not fit."""
    given = None if settings.params is None else _GivenParams.read(settings.params)
    if isinstance(settings.optimizer, Optimizer):
        optimizer = settings.optimizer
    else:
        assert given is not None, "settings refuse a callable without params"
        optimizer = _make(settings.optimizer, given)
    _check_steps_alone(optimizer)
    if given is None:
        given = _GivenParams.read(_groups_of(optimizer))
    else:
        given.check_belong_to(optimizer)
    return OptimizedParameters(optimizer, given.tensors, _names(settings.parameter_names, given))


@dataclass(frozen=True, slots=True, eq=False)
class _GivenParams:
    """`params` read once (it may be a generator)."""

    as_given: list[Any]
    groups: tuple[tuple[torch.Tensor, ...], ...] | None
    """The groups, if groups were given."""
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] | None

    @classmethod
    def read(cls, params: Params) -> _GivenParams:
        if isinstance(params, torch.Tensor):
            raise TypeError("params must be an iterable of tensors or of param groups, got one tensor")
        if not isinstance(params, Iterable):
            raise TypeError(f"params must be an iterable of tensors or of param groups, got {params!r}")
        items: list[Any] = list(params)
        grouped = bool(items) and all(isinstance(item, dict) for item in items)
        if grouped:
            items = [{**group, "params": _members(group)} for group in items]
        members = [group["params"] for group in items] if grouped else [items]
        pairs = [[_named(item) for item in group] for group in members]
        flat = [pair for group in pairs for pair in group]
        names = [name for name, _ in flat if name is not None]
        if not names and grouped:
            names = [name for group in items for name in group.get("param_names", ())]
        given = cls(
            items,
            tuple(tuple(tensor for _, tensor in group) for group in pairs) if grouped else None,
            tuple(tensor for _, tensor in flat),
            tuple(names) if len(names) == len(flat) else None,
        )
        given._check_tensors()
        return given

    def _check_tensors(self) -> None:
        if not self.tensors:
            raise ValueError("params must hold at least one tensor, got none")
        seen: dict[int, int] = {}
        for index, tensor in enumerate(self.tensors):
            check_tensor(f"params[{index}]", tensor)
            if not tensor.is_floating_point():
                raise ValueError(f"params[{index}] must be of a floating-point dtype, got {tensor.dtype}")
            first = seen.setdefault(id(tensor), index)
            if first != index:
                raise ValueError(f"params holds one tensor twice: params[{first}] and params[{index}] are the same")

    def check_belong_to(self, optimizer: Optimizer) -> None:
        """They must be the optimizer's own tensors, group by group where groups were given."""
        own = tuple(tuple(group["params"]) for group in optimizer.param_groups)
        if self.groups is not None:
            if len(own) != len(self.groups):
                raise ValueError(f"params has {len(self.groups)} groups, optimizer has {len(own)}")
            for index, (mine, theirs) in enumerate(zip(self.groups, own, strict=True)):
                if list(map(id, mine)) != list(map(id, theirs)):
                    raise ValueError(f"params group {index} does not hold the tensors of the optimizer's group {index}")
            return
        known = {id(tensor) for group in own for tensor in group}
        strangers = [index for index, tensor in enumerate(self.tensors) if id(tensor) not in known]
        if strangers:
            raise ValueError(f"params must be the optimizer's own tensors: params[{strangers[0]}] is not one of them")
        if len(known) != len(self.tensors):
            raise ValueError(f"params holds {len(self.tensors)} of the optimizer's {len(known)} tensors, all are needed")


def check_tensor(argument: str, tensor: object) -> None:
    """Refuse what cannot be copied to and from a buffer: no tensor, a computed one, a sparse or a meta one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument} must be a tensor, got {tensor!r}")
    if tensor.grad_fn is not None:
        raise ValueError(f"{argument} must be a leaf tensor, got one computed by {type(tensor.grad_fn).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(f"{argument} must be a dense tensor with data, got layout {tensor.layout} on device {tensor.device}")
    if tensor.is_complex():
        raise ValueError(f"{argument} must not be complex, got {tensor.dtype}: use torch.view_as_real")


def required_arguments(method: Callable[..., Any]) -> list[str]:
    """Names of the arguments, after the first (self), without which an unbound method cannot be called."""
    ignored = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = list(inspect.signature(method).parameters.values())[1:]
    return [a.name for a in arguments if a.default is a.empty and a.kind not in ignored]


def _make(factory: Callable[[Any], Optimizer], given: _GivenParams) -> Optimizer:
    optimizer = factory(given.as_given)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must return a torch.optim.Optimizer when called with params, got {optimizer!r}")
    return optimizer


def _check_steps_alone(optimizer: Optimizer) -> None:
    if needed := required_arguments(type(optimizer).step):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} cannot be used: its step needs {', '.join(needed)}, "
            "and an averager has no loss to evaluate again"
        )


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: group[key] for key in ("params", "param_names") if key in group} for group in optimizer.param_groups]


def _members(group: dict[str, Any]) -> list[Any]:
    members = group.get("params")
    if members is None:
        raise ValueError(f"params holds a group without 'params': it has the keys {sorted(group)}")
    return [members] if isinstance(members, torch.Tensor) else list(members)


def _named(item: Any) -> tuple[str | None, torch.Tensor]:
    """A parameter alone, or a pair as from ``model.named_parameters()``."""
    return (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 else (None, item)


def _names(parameter_names: Sequence[str] | None, given: _GivenParams) -> tuple[str, ...]:
    if parameter_names is None:
        return given.names if given.names is not None else tuple(str(index) for index in range(len(given.tensors)))
    if len(parameter_names) != len(given.tensors):
        raise ValueError(f"parameter_names has {len(parameter_names)} names for {len(given.tensors)} parameters")
    return tuple(parameter_names)
