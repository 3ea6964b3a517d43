"""`TrainingStateAverager`: a model's training state, kept weakly in step with a swarm from an async training loop.

The shell around `core.TrainingCore`: it runs the core's actions on a pool thread and its rounds on an `Averager`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, assert_never

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swarmavg.averager import Averager, AveragerOptions
from swarmavg.control import StepResult
from swarmavg.errors import ClosedError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.peer import Peer
from swarmavg.runtime.offload import offload
from swarmavg.training.actions import Action, RunRound, StartRound, StepSequence, TouchModel, WaitForRound
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


class TrainingStateAverager:
    """Averages parameters, chosen optimizer statistics and extra tensors with the peers of the same run.

    It stands where ``optimizer.step()`` stood in the training loop::

        async with TrainingStateAverager(peer=peer, prefix="run", optimizer=optimizer) as averager:
            ...
            loss.backward()
            await averager.step(optimizer_step=True, zero_grad=True, averaging_round=True)

    The model's tensors are touched only while the caller waits in `step`; a delayed round works on copies.

    Arguments:
        peer: the started `Peer` it lives on.
        prefix: name of the run.
        optimizer: a torch optimizer, or a callable that makes one from `params`. Its `step` must need no closure.
        params: parameters or param groups; needed with a callable, and else the optimizer's own.
        scheduler: an LR scheduler of this optimizer, or a callable that makes one from it. It follows `local_epoch`.
        initialize_optimizer: create all optimizer state now, without moving anything; by default if there is none yet.
        offload_optimizer: not available in this version.
        custom_gradients: has no effect without `offload_optimizer`.
        reuse_tensors: average parameters and statistics in place; they must be CPU tensors of float32 or float64.
        sync_epoch_when_averaging: after a round, `local_epoch` becomes the highest of the group.
        parameter_names: one name per parameter, in the order of `params`.
        average_opt_statistics: names of optimizer statistics to average too, such as ``"exp_avg_sq"``.
        extra_tensors: further tensors to average, such as batch-norm statistics; integer ones are not averaged.
        delta_rule_averaging: add what a round changed to what the tensors have become meanwhile, instead of overwriting them.
        on_averaging_failure: ``"warn"`` logs a failed round and goes on with local values, ``"raise"`` raises its error.
        status_loglevel: level of the progress messages, as a number or name of the `logging` module.
        options: the optional arguments of `Averager`, such as `target_group_size`.

    Raises:
        ValueError, TypeError: for an argument that does not fit, with its name and value.
    """

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
        self._one_step_at_a_time = asyncio.Lock()
        self._delayed: _DelayedRound | None = None
        self._started = False
        self._closed = False

    # -- life --------------------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Begin to take part in the run. Returns at once if it runs already."""
        await self._averager.start()
        self._started = True
        return self

    async def aclose(self) -> None:
        """Leave the run. A delayed round is cancelled, its results are dropped. A second call does nothing."""
        self._closed = True
        await self._averager.aclose()  # ends its steps, within its shutdown_timeout
        self._core.abandon_pending()
        if self._delayed is not None:
            self._delayed.task.cancel()
            await asyncio.wait([self._delayed.task], timeout=self._averager.config.shutdown_timeout)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        try:
            await self._averager.__aexit__(kind, error, traceback)  # in haste, where there is an error
        finally:
            await self.aclose()

    # -- training ----------------------------------------------------------------------------------------------------------

    async def step(
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
        """Do what is asked for, in this order: wait for a delayed round, apply it, raise the epoch, optimizer step,
        scheduler, zero the gradients, averaging round.

        Arguments:
            wait_for_delayed_update: wait for a delayed round first; by default if this call steps, zeroes or averages.
            apply_delayed_updates: write the results of a delayed round that has ended into the model.
            increment_epoch: ``local_epoch += 1``; the scheduler follows.
            optimizer_step: one step of the optimizer.
            zero_grad: reset the gradients, as ``optimizer.zero_grad()`` does.
            delay_optimizer_step: not available in this version, as it needs `offload_optimizer`.
            averaging_round: average with a group.
            delay_averaging: average in the background, on copies; a later call applies the results.
            grad_scaler: not available in this version.
            averaging_opts: arguments of the round: `gather`, `weight`, `timeout`, `scheduled_time`, `allow_retries`.

        Returns the result of the round that this call ran, with that of a delayed round it applied as `previous`; else that of
        the delayed round it applied; else, and when the round failed, `None`. Calls at once queue up.

        Raises:
            ValueError: for a combination that contradicts itself, before anything is done.
            Exception: whatever the optimizer raised; epoch, schedule and gradients are then as before, and no round runs.
            SwarmError: of a failed round, with ``on_averaging_failure="raise"``.
            ClosedError: the averager is not running.
        """
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
        call.check_schedule(asyncio.get_running_loop().time())
        self._check_running()
        async with self._one_step_at_a_time:
            self._check_running()
            return await self._drive(self._core.step_sequence(call))

    def _check_running(self) -> None:
        if self._closed:
            raise ClosedError("this TrainingStateAverager was closed")
        if not self._started:
            raise ClosedError("this TrainingStateAverager has not been started: use `async with`, or await start()")
        self._averager.peer.check_running()

    async def _drive(self, sequence: StepSequence) -> TrainingStepResult | None:
        """Run a step's actions; see `actions.drive_blocking` for the same in a plain thread."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                action = sequence.send(answer) if error is None else sequence.throw(error)
            except StopIteration as end:
                result: TrainingStepResult | None = end.value
                return result
            answer, error = None, None
            try:
                answer = await self._perform(action)
            except BaseException as raised:  # noqa: BLE001  (nothing is swallowed: the sequence re-raises what is not its own)
                error = raised

    async def _perform(self, action: Action) -> Any:
        match action:
            case TouchModel(work):
                return await offload(work)
            case RunRound(options):
                return await self._round(options)
            case StartRound(options):
                self._delayed = _DelayedRound(asyncio.create_task(self._round(options), name=f"delayed-round-{self.prefix}"))
                return self._delayed
            case WaitForRound(background):
                assert isinstance(background, _DelayedRound), "the round that is pending was started here"
                return await asyncio.wait([background.task])
            case _:
                assert_never(action)

    async def _round(self, options: RoundOptions) -> StepResult:
        result: StepResult = await self._averager.step(**options)
        return result

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
        """Raised by ``step(increment_epoch=True)``, and by rounds with `sync_epoch_when_averaging`."""
        return self._core.local_epoch

    @property
    def averager(self) -> Averager:
        """The averager underneath. Its tensors are this object's buffers: do not step it."""
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
        """The bucket in which the next round looks for a group."""
        return self._averager.get_group_bits()

    def story(self, round_id: GroupId | str | None = None) -> str:
        """What happened in one of the latest rounds; see `Averager.story`."""
        return self._averager.story(round_id)

    def set_group_bits(self, bits: str) -> None:
        self._averager.set_group_bits(bits)


class _DelayedRound:
    """A round in a task of its own: an `actions.BackgroundRound`. Its error is reported by the call that takes its result."""

    def __init__(self, task: asyncio.Task[StepResult]) -> None:
        self.task = task
        task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # asyncio need not complain

    def done(self) -> bool:
        return self.task.done()

    def result(self) -> StepResult:
        if self.task.cancelled():
            raise ClosedError("the averager was closed during a delayed round")
        return self.task.result()
