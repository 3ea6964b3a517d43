"""The training state that follows the swarm: optimizer, schedule, epoch and averaging buffers, and what a step does with them.

Purely synchronous: no event loop, threads or network. The shells in `state_averager` and in the blocking facade run its steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swarmavg.compression.interface import TensorInfo
from swarmavg.control import StepResult
from swarmavg.errors import BlockingCallError, ClosedError, ForkedError, SwarmError
from swarmavg.planning.partition import Span
from swarmavg.telemetry.logs import get_logger
from swarmavg.training.actions import BackgroundRound, RunRound, StartRound, StepSequence, TouchModel, WaitForRound
from swarmavg.training.averaged_tensors import AveragingBuffers, list_averaged
from swarmavg.training.device_copy import CallerStreams
from swarmavg.training.optimizer_setup import check_tensor, set_up_optimizer
from swarmavg.training.optimizer_state import create_statistics, find_statistics, has_state_tensors
from swarmavg.training.results import TrainingStepResult, training_result, wrap_gather
from swarmavg.training.schedules import EpochSchedule, set_up_scheduler
from swarmavg.training.settings import RoundOptions, StepCall, TrainingSettings

_log = get_logger(__name__)


class TrainingCore:
    """One model's training state. `auxiliary`: this peer only helps others, so that nothing is ever written back."""

    def __init__(self, settings: TrainingSettings, *, auxiliary: bool = False) -> None:
        self._settings = settings
        self._auxiliary = auxiliary
        self._optimized = set_up_optimizer(settings)
        self.scheduler: LRScheduler | None = set_up_scheduler(settings.scheduler, self.optimizer)
        self.local_epoch = 0
        self._schedule = EpochSchedule(self.scheduler)
        extras, self.shared_only = _split_extras(settings.extra_tensors, self.parameters)
        if settings.initialize_optimizer or (settings.initialize_optimizer is None and not has_state_tensors(self.optimizer)):
            create_statistics(self.optimizer, self.parameters)
        statistics = find_statistics(self.optimizer, self.parameters, settings.average_opt_statistics)
        averaged = list_averaged(self._optimized, statistics, extras)
        self._buffers = AveragingBuffers(averaged, reuse=settings.reuse_tensors, delta=settings.delta_rule_averaging)
        self._trained = (*self.parameters, *extras.values())
        self._pending: BackgroundRound | None = None

    @property
    def optimizer(self) -> Optimizer:
        return self._optimized.optimizer

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return self._optimized.parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self._optimized.names

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The tensors to be averaged: for the averager."""
        return self._buffers.tensors

    @property
    def infos(self) -> Sequence[TensorInfo]:
        """The description of each buffer: for the averager."""
        return self._buffers.infos

    @property
    def pending(self) -> bool:
        """Whether a delayed round is under way, or its results wait to be applied."""
        return self._pending is not None

    def abandon_pending(self) -> BackgroundRound | None:
        """On close: forget the delayed round whose results were not applied, and return it."""
        abandoned, self._pending = self._pending, None
        if abandoned is not None:
            _log.warning("closed before the results of a delayed round were applied", finished=abandoned.done())
        return abandoned

    def step_sequence(self, call: StepCall) -> StepSequence:
        """The actions of one step, in order. Not to be interleaved with those of another step."""
        self._check(call)
        streams = CallerStreams.of_this_thread(self._trained)
        if self._pending is not None and call.waits:
            yield WaitForRound(self._pending)
        delayed = self._take_finished() if call.apply_delayed_updates else None
        yield TouchModel(partial(self._local_part, call, delayed, streams))
        if not call.averaging_round:
            return delayed
        options = self._round_options(call)
        if call.delay_averaging:
            self._pending = yield StartRound(options)
            self._tell("delayed averaging round started")
            return delayed
        try:
            finished: StepResult = yield RunRound(options)
        except SwarmError as error:
            self._report_failure(error)
            return delayed
        result = training_result(finished, self.local_epoch, previous=delayed)
        yield TouchModel(partial(self._finish_round, result, streams))
        return result

    # -- what a step does with the model, in the thread that may touch it ------------------------------------------------

    def _local_part(self, call: StepCall, delayed: TrainingStepResult | None, streams: CallerStreams) -> None:
        with streams.current():
            if delayed is not None:
                self._apply(delayed)
            self._train(call)
            if call.averaging_round:
                self._buffers.load()

    def _train(self, call: StepCall) -> None:
        epoch_before = self.local_epoch
        if call.increment_epoch:
            self.local_epoch += 1
        if call.optimizer_step:
            try:
                self.optimizer.step()
            except BaseException:
                self.local_epoch = epoch_before
                raise
        self._schedule.catch_up(self.local_epoch)
        if call.zero_grad:
            self.optimizer.zero_grad()

    def _finish_round(self, result: TrainingStepResult, streams: CallerStreams) -> None:
        with streams.current():
            self._apply(result)
            self._schedule.catch_up(self.local_epoch)

    def _apply(self, result: TrainingStepResult) -> None:
        if not self._auxiliary:
            self._buffers.apply(_averaged_spans(result))
        if self._settings.sync_epoch_when_averaging:
            self.local_epoch = max([self.local_epoch, *result.epochs.values()])
        self._tell("averages applied", group_size=result.group_size, fraction=result.fraction)

    # -- rounds ------------------------------------------------------------------------------------------------------------

    def _check(self, call: StepCall) -> None:
        """Refuse, before anything is done, what this call cannot do in the present state."""
        if call.averaging_round:
            self._optimized.check_unchanged()
            self._buffers.find_all()
        if call.delay_averaging and self._settings.reuse_tensors:
            raise ValueError(
                "delay_averaging=True cannot be combined with reuse_tensors=True: the round would write into the parameters "
                "while they are trained"
            )
        if self._pending is None or not call.averaging_round:
            return
        if not call.apply_delayed_updates:
            raise ValueError(
                "apply_delayed_updates=False cannot be combined with averaging_round=True while the results of a delayed round "
                "wait to be applied"
            )
        if not call.waits and not self._pending.done():
            raise ValueError(
                "wait_for_delayed_update=False cannot be combined with averaging_round=True while a delayed round is pending"
            )

    def _round_options(self, call: StepCall) -> RoundOptions:
        options = call.round_options
        options["gather"] = wrap_gather(self.local_epoch, options.get("gather"))
        return options

    def _take_finished(self) -> TrainingStepResult | None:
        """The result of the delayed round, if it is there; the round is then no longer pending."""
        if self._pending is None or not self._pending.done():
            return None
        finished, self._pending = self._pending, None
        try:
            return training_result(finished.result(), self.local_epoch)
        except SwarmError as error:
            self._report_failure(error)
            return None

    def _report_failure(self, error: SwarmError) -> None:
        """Of a round. Raises it where the user wants that, or where the averager is of no more use."""
        if self._settings.on_averaging_failure == "raise" or isinstance(error, ClosedError | ForkedError | BlockingCallError):
            raise error
        _log.warning("averaging round failed, training goes on with local values", epoch=self.local_epoch, error=str(error))

    def _tell(self, event: str, **values: object) -> None:
        _log.log(self._settings.log_level, event, epoch=self.local_epoch, **values)


def _averaged_spans(result: StepResult) -> list[Span]:
    return [span for span, peers in result.contributors if peers]


def _split_extras(
    extras: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Extra tensors that are averaged, and those that cannot be and are only shared with the state, each with its name."""
    if isinstance(extras, torch.Tensor) or not isinstance(extras, Iterable):
        raise TypeError(f"extra_tensors must be a sequence of tensors, got {extras!r:.200}")
    named = {f"extra_tensors[{index}]": extra for index, extra in enumerate(extras)}
    seen = {id(parameter): f"params[{index}]" for index, parameter in enumerate(parameters)}
    for name, extra in named.items():
        check_tensor(name, extra)
        if id(extra) in seen:
            raise ValueError(f"{name} is the same tensor as {seen[id(extra)]}")
        seen[id(extra)] = name
    averaged = {name: extra for name, extra in named.items() if extra.is_floating_point()}
    shared_only = {name: extra for name, extra in named.items() if name not in averaged}
    if shared_only:
        listed = ", ".join(f"{name} ({extra.dtype})" for name, extra in shared_only.items())
        warnings.warn(f"tensors that are not of a floating-point dtype are not averaged, only shared: {listed}", stacklevel=4)
    return averaged, shared_only
