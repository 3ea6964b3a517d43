"""What the user asks for: the constructor's arguments and one call's arguments, checked once. Nothing is done here."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, TypedDict, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swarmavg.config import check_number, check_seconds
from swarmavg.control import check_scheduled_time, check_weight_argument
from swarmavg.runtime.gathering import check_gather
from swarmavg.training.results import wrap_gather

Params: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
OptimizerFactory: TypeAlias = Callable[[Any], Optimizer]
SchedulerFactory: TypeAlias = Callable[[Optimizer], LRScheduler]
OnFailure: TypeAlias = Literal["warn", "raise"]


class RoundOptions(TypedDict, total=False):
    """What `averaging_opts` may hold: keyword arguments of one round of the averager."""

    gather: Any
    weight: float | None
    timeout: float | None
    scheduled_time: float | None
    allow_retries: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSettings:
    """The arguments of a `TrainingStateAverager`, without the peer and without those of its averager."""

    optimizer: Optimizer | OptimizerFactory
    params: Params | None = None
    scheduler: LRScheduler | SchedulerFactory | None = None
    initialize_optimizer: bool | None = None
    offload_optimizer: bool = False
    custom_gradients: bool = False
    reuse_tensors: bool = False
    sync_epoch_when_averaging: bool = False
    parameter_names: Sequence[str] | None = None
    average_opt_statistics: Sequence[str] = ()
    extra_tensors: Sequence[torch.Tensor] = ()
    delta_rule_averaging: bool = False
    on_averaging_failure: OnFailure = "warn"
    status_loglevel: int | str = "debug"

    def __post_init__(self) -> None:
        _check_switches(self, optional={"initialize_optimizer"})
        if not isinstance(self.optimizer, Optimizer) and not callable(self.optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a callable, got {self.optimizer!r}")
        if self.made_here and self.params is None:
            raise ValueError("params must be given when optimizer is a callable, got params=None")
        self._check_scheduler()
        self._check_modes()
        _check_names("average_opt_statistics", self.average_opt_statistics)
        if self.parameter_names is not None:
            _check_names("parameter_names", self.parameter_names)
        if self.on_averaging_failure not in ("warn", "raise"):
            raise ValueError(f"on_averaging_failure must be 'warn' or 'raise', got {self.on_averaging_failure!r}")
        _ = self.log_level

    @property
    def made_here(self) -> bool:
        """Whether the optimizer is made by the averager, from `params`."""
        return not isinstance(self.optimizer, Optimizer)

    @property
    def log_level(self) -> int:
        """`status_loglevel` as a number of the `logging` module."""
        level = self.status_loglevel
        if isinstance(level, str):
            level = logging.getLevelNamesMapping().get(level.upper(), -1)
        if isinstance(level, bool) or not isinstance(level, int) or level < 0:
            raise ValueError(f"status_loglevel must be a level of the logging module, got {self.status_loglevel!r}")
        return level

    def _check_scheduler(self) -> None:
        scheduler = self.scheduler
        if scheduler is None or (callable(scheduler) and not isinstance(scheduler, LRScheduler)):
            return
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be an LR scheduler or a callable(optimizer), got {scheduler!r}")
        if self.made_here:
            raise ValueError(
                f"scheduler must be a callable(optimizer) when optimizer is a callable, got {type(scheduler).__name__}: "
                "it belongs to another optimizer"
            )

    def _check_modes(self) -> None:
        if self.delta_rule_averaging and self.reuse_tensors:
            raise ValueError("delta_rule_averaging=True cannot be combined with reuse_tensors=True: it makes no copies")
        offloads = self.offload_optimizer and not self.reuse_tensors
        if self.offload_optimizer and not offloads:
            _warn("offload_optimizer=True has no effect together with reuse_tensors=True")
        if self.custom_gradients and not offloads:
            _warn("custom_gradients=True has no effect unless the optimizer is offloaded (offload_optimizer=True)")
        if offloads and not self.made_here:
            raise ValueError("offload_optimizer=True needs an optimizer given as a callable, got an optimizer instance")
        if offloads:
            raise NotImplementedError("offload_optimizer=True is not available in this version")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCall:
    """The arguments of one call of `step`. Contradictions that the arguments alone show are refused here."""

    wait_for_delayed_update: bool | None = None
    apply_delayed_updates: bool = True
    increment_epoch: bool = False
    optimizer_step: bool = False
    zero_grad: bool = False
    delay_optimizer_step: bool = False
    averaging_round: bool = False
    delay_averaging: bool | None = None
    grad_scaler: Any = None
    averaging_opts: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_switches(self, optional={"wait_for_delayed_update", "delay_averaging"})
        self._check_delays()
        self._check_averaging_opts()
        if self.grad_scaler is not None:
            raise NotImplementedError("grad_scaler is not available in this version")

    @property
    def waits(self) -> bool:
        """Whether a pending background round is waited for first."""
        if self.wait_for_delayed_update is not None:
            return self.wait_for_delayed_update
        return self.optimizer_step or self.zero_grad or self.averaging_round

    def check_schedule(self, now: float) -> None:
        """Raises `ValueError` for a `scheduled_time` that the round would refuse. `now` is of the event loop's clock."""
        timeout = self.round_options.get("timeout")
        check_scheduled_time(self.round_options.get("scheduled_time"), now + (math.inf if timeout is None else timeout), now)

    @property
    def round_options(self) -> RoundOptions:
        return cast("RoundOptions", dict(self.averaging_opts or {}))

    def _check_delays(self) -> None:
        if self.delay_optimizer_step:
            if self.delay_averaging is False:
                raise ValueError("delay_optimizer_step=True cannot be combined with delay_averaging=False")
            if self.grad_scaler is not None:
                raise ValueError(f"delay_optimizer_step=True cannot be combined with grad_scaler={self.grad_scaler!r}")
            raise ValueError("delay_optimizer_step=True needs an averager made with offload_optimizer=True")
        if self.delay_averaging and not self.averaging_round:
            raise ValueError("delay_averaging=True needs averaging_round=True: without it there is no round to delay")
        if self.grad_scaler is not None and not self.optimizer_step:
            raise ValueError(f"grad_scaler={self.grad_scaler!r} needs optimizer_step=True")

    def _check_averaging_opts(self) -> None:
        if self.averaging_opts is None:
            return
        if not isinstance(self.averaging_opts, Mapping):
            raise TypeError(f"averaging_opts must be a dict of arguments of a round, got {self.averaging_opts!r}")
        for name, value in self.averaging_opts.items():
            if name in ("wait", "require_trigger"):
                raise ValueError(f"{name}={value!r} is not allowed in averaging_opts: see delay_averaging")
            if name not in RoundOptions.__annotations__:
                raise TypeError(f"unknown {name}={value!r} in averaging_opts; known: {', '.join(RoundOptions.__annotations__)}")
        self._check_round_options(self.round_options)
        if not self.averaging_round:
            _warn(f"averaging_opts={dict(self.averaging_opts)!r} has no effect without averaging_round=True")

    def _check_round_options(self, options: RoundOptions) -> None:
        """What the round would refuse is refused here: a call either does nothing or gets as far as the round."""
        if options.get("weight") is not None:
            check_weight_argument(options.get("weight"), "averaging_opts['weight']")
        check_seconds("averaging_opts['timeout']", options.get("timeout"), optional=True, infinite=True)
        if options.get("scheduled_time") is not None:
            check_number("averaging_opts['scheduled_time']", options.get("scheduled_time"))
        if not isinstance(options.get("allow_retries", True), bool):
            raise TypeError(f"averaging_opts['allow_retries'] must be True or False, got {options.get('allow_retries')!r}")
        check_gather(wrap_gather(0, options.get("gather")))


def refuse_tensor_infos(options: Mapping[str, Any]) -> None:
    """The averager's `tensor_infos` and `tensors` are made from the training state, not given."""
    for name in ("tensor_infos", "tensors"):
        if name in options:
            raise TypeError(f"{name} cannot be given here: it follows from the optimizer, parameter_names and extra_tensors")


def _check_switches(settings: object, optional: set[str]) -> None:
    """Switches are real booleans: the string "false" would be taken for true."""
    for field in fields(settings):  # type: ignore[arg-type]  # both callers are dataclasses
        value = getattr(settings, field.name)
        if field.name in optional and not (value is None or isinstance(value, bool)):
            raise TypeError(f"{field.name} must be True, False or None, got {value!r}")
        if isinstance(field.default, bool) and not isinstance(value, bool):
            raise TypeError(f"{field.name} must be True or False, got {value!r}")


def _check_names(argument: str, names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{argument} must be a sequence of names, got {names!r}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must hold names only, got {name!r}")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} names {repeated} more than once")


def _warn(message: str) -> None:
    """A Python warning, at the line that constructed or called (two dataclass frames and the averager's lie between)."""
    warnings.warn(message, UserWarning, stacklevel=6)
