"""The training-state averager for plain loops.

Model, gradients and scheduler are touched by the calling thread alone, inside `step`; only rounds go through the worker thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swarmavg.averager import AveragerOptions
from swarmavg.control import StepResult
from swarmavg.errors import BlockingCallError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.sync.averager import Averager, background_step, check_usable
from swarmavg.sync.call import Call
from swarmavg.sync.peer import Peer
from swarmavg.sync.resident import mirrors
from swarmavg.training import state_averager as core
from swarmavg.training.actions import BackgroundRound, drive_blocking
from swarmavg.training.core import TrainingCore
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.settings import (
    OnFailure,
    OptimizerFactory,
    Params,
    RoundOptions,
    SchedulerFactory,
    StepCall,
    TrainingSettings,
    refuse_tensor_infos,
)


@mirrors(core.TrainingStateAverager)
class TrainingStateAverager:
    __doc__ = None

    def __init__(
        self,
        *,
        peer: Peer,
        prefix: str,
        optimizer: Optimizer | OptimizerFactory,
        params: Params | None = None,
        scheduler: LRScheduler | SchedulerFactory | None = None,
        initialize_optimizer: bool | None = None,
        offload_optimizer: bool = False,
        custom_gradients: bool = False,
        reuse_tensors: bool = False,
        sync_epoch_when_averaging: bool = False,
        parameter_names: Sequence[str] | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[torch.Tensor] = (),
        delta_rule_averaging: bool = False,
        on_averaging_failure: OnFailure = "warn",
        status_loglevel: int | str = "debug",
        **options: Unpack[AveragerOptions],
    ) -> None:
        refuse_tensor_infos(options)
        settings = TrainingSettings(
            optimizer=optimizer,
            params=params,
            scheduler=scheduler,
            initialize_optimizer=initialize_optimizer,
            offload_optimizer=offload_optimizer,
            custom_gradients=custom_gradients,
            reuse_tensors=reuse_tensors,
            sync_epoch_when_averaging=sync_epoch_when_averaging,
            parameter_names=parameter_names,
            average_opt_statistics=average_opt_statistics,
            extra_tensors=extra_tensors,
            delta_rule_averaging=delta_rule_averaging,
            on_averaging_failure=on_averaging_failure,
            status_loglevel=status_loglevel,
        )
        self._core = TrainingCore(settings, auxiliary=options.get("auxiliary", False))
        options["tensor_infos"] = self._core.infos
        self._averager = Averager(self._core.buffers, peer=peer, prefix=prefix, **options)
        self._rounds = _Rounds(self._averager)
        self._one_step_at_a_time = threading.Lock()
        self._stepping: int | None = None

    # -- life --------------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        self._averager.start()
        return self

    def close(self) -> None:
        self._averager.close()  # ends its steps, the delayed one too
        self._core.abandon_pending()

    def __enter__(self) -> Self:
        self._averager.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._averager.__exit__(kind, error, traceback)  # in haste, where there is an error
        finally:
            self.close()

    # -- training ----------------------------------------------------------------------------------------------------------

    def step(
        self,
        *,
        wait_for_delayed_update: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        delay_optimizer_step: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        grad_scaler: Any = None,
        averaging_opts: Mapping[str, Any] | None = None,
    ) -> TrainingStepResult | None:
        call = StepCall(
            wait_for_delayed_update=wait_for_delayed_update,
            apply_delayed_updates=apply_delayed_updates,
            increment_epoch=increment_epoch,
            optimizer_step=optimizer_step,
            zero_grad=zero_grad,
            delay_optimizer_step=delay_optimizer_step,
            averaging_round=averaging_round,
            delay_averaging=delay_averaging,
            grad_scaler=grad_scaler,
            averaging_opts=averaging_opts,
        )
        call.check_schedule(time.monotonic())
        with self._turn():
            return drive_blocking(self._core.step_sequence(call), self._rounds)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One step at a time: those of other threads queue up."""
        check_usable(self._averager)  # before the lock: in a forked child, whoever held it is missing
        if self._stepping == threading.get_ident():
            raise BlockingCallError("step was called within a step of the same averager, as by an optimizer's hook")
        with self._one_step_at_a_time:
            check_usable(self._averager)
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    # -- what it is --------------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        return self._core.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        return self._core.scheduler

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self._core.parameter_names

    @property
    def local_epoch(self) -> int:
        return self._core.local_epoch

    @property
    def averager(self) -> Averager:
        return self._averager

    @property
    def peer(self) -> Peer:
        return self._averager.peer

    @property
    def peer_id(self) -> PeerId:
        return self._averager.peer_id

    @property
    def prefix(self) -> str:
        return self._averager.prefix

    def get_group_bits(self) -> str:
        return self._averager.get_group_bits()

    def story(self, round_id: GroupId | str | None = None) -> str:
        """What happened in one of the latest rounds; see `Averager.story`."""
        return self._averager.story(round_id)

    def set_group_bits(self, bits: str) -> None:
        self._averager.set_group_bits(bits)


class _Rounds:
    """How the training core runs its rounds from the calling thread: `actions.BlockingRounds`."""

    def __init__(self, averager: Averager) -> None:
        self._averager = averager

    def run(self, options: RoundOptions) -> StepResult:
        result: StepResult = self._averager.step(**options)
        return result

    def start(self, options: RoundOptions) -> BackgroundRound:
        return background_step(self._averager, options)

    def wait(self, background: BackgroundRound) -> None:
        """An interrupt leaves the round running: a later call applies it."""
        assert isinstance(background, Call), "the round that is pending was started here"
        background.wait()
