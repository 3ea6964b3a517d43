"""The order of a training step and its rules, on the synchronous core with rounds made up by the test."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from swarmavg.control import StepResult
from swarmavg.errors import AllreduceError, ClosedError, MatchmakingError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.planning.partition import Span
from swarmavg.protocol.outcome import Exclusion, ExclusionCode
from swarmavg.training.actions import drive_blocking
from swarmavg.training.core import TrainingCore
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.settings import RoundOptions, StepCall, TrainingSettings

ME, OTHER, THIRD = (PeerId(bytes([number]) * 32) for number in (1, 2, 3))


def envelope(epoch: Any, value: Any = None) -> dict[str, Any]:
    return {"epoch": epoch, "gather": value}


class FakeRounds:
    """Rounds with one other peer, whose tensors are all `theirs`; delayed ones end when the test says so."""

    def __init__(self, core: TrainingCore, theirs: float = 0.0) -> None:
        self.core = core
        self.theirs = theirs
        self.story: list[str] = []
        self.options: list[RoundOptions] = []
        self.others: dict[PeerId, Any] = {OTHER: envelope(0, "theirs")}
        self.excluded: dict[PeerId, Exclusion] = {}
        self.error: BaseException | None = None
        self.averaged: list[Span] | None = None
        self.started: Future[StepResult] | None = None

    def run(self, options: RoundOptions) -> StepResult:
        self.story.append("round")
        self.options.append(options)
        return self._outcome()

    def start(self, options: RoundOptions) -> Future[StepResult]:
        self.story.append("start")
        self.options.append(options)
        self.started = Future()
        return self.started

    def wait(self, background: object) -> None:
        self.story.append("wait")
        assert self.started is not None
        assert background is self.started
        if not self.started.done():
            self.finish()

    def finish(self) -> None:
        """The delayed round ends."""
        assert self.started is not None
        try:
            self.started.set_result(self._outcome())
        except Exception as error:
            self.started.set_exception(error)

    def step(self, **arguments: Any) -> TrainingStepResult | None:
        return drive_blocking(self.core.step_sequence(StepCall(**arguments)), self)

    def _outcome(self) -> StepResult:
        if self.error is not None:
            raise self.error
        spans = self.averaged
        if spans is None:
            spans = [Span(0, sum(buffer.numel() for buffer in self.core.buffers))]
        for buffer in self.core.buffers:
            buffer.add_(self.theirs).div_(2)
        return StepResult(
            gathered={ME: self.options[-1]["gather"], **self.others},
            round_id=GroupId.random(),
            contributors=[(span, (ME, OTHER)) for span in spans],
            missing=[],
            fraction=1.0,
            excluded=self.excluded,
            bytes_sent=1,
            bytes_received=1,
            matchmaking_seconds=0.0,
            allreduce_seconds=0.0,
        )


def one_parameter(value: float = 1.0, numel: int = 2) -> nn.Parameter:
    return nn.Parameter(torch.full((numel,), value))


def set_up(value: float = 1.0, **arguments: Any) -> tuple[nn.Parameter, FakeRounds]:
    """One parameter trained by SGD with lr 1; whoever sets its gradient chooses the step."""
    parameter = one_parameter(value)
    auxiliary = arguments.pop("auxiliary", False)
    settings = TrainingSettings(optimizer=lambda params: torch.optim.SGD(params, lr=1.0), params=[parameter], **arguments)
    return parameter, FakeRounds(TrainingCore(settings, auxiliary=auxiliary))


def pull(parameter: nn.Parameter, by: float) -> None:
    """Make the next optimizer step move the parameter by `by`."""
    parameter.grad = torch.full_like(parameter, -by)


def test_actions_run_in_their_order() -> None:
    parameter, rounds = set_up(scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)))
    optimizer, scheduler = rounds.core.optimizer, rounds.core.scheduler
    assert scheduler is not None
    rounds.step(averaging_round=True, delay_averaging=True)
    rounds.story.clear()

    def tell(name: str, original: Callable[[], Any], epoch: bool = False) -> Callable[[], Any]:
        def told() -> Any:
            rounds.story.append(f"{name}@{rounds.core.local_epoch} {parameter[0].item():g}")
            return original()

        return told

    optimizer.register_step_pre_hook(lambda *_: rounds.story.append(f"step@{rounds.core.local_epoch} {parameter[0].item():g}"))
    scheduler.step = tell("schedule", scheduler.step)  # type: ignore[method-assign, assignment]
    optimizer.zero_grad = tell("zero", optimizer.zero_grad)  # type: ignore[method-assign, assignment]
    pull(parameter, 1.0)
    rounds.step(increment_epoch=True, optimizer_step=True, zero_grad=True, averaging_round=True)
    assert rounds.story == ["wait", "step@1 0.5", "schedule@1 1.5", "zero@1 1.5", "round"]
    assert parameter.grad is None
    assert parameter.tolist() == [0.75, 0.75]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_empty_call_does_nothing() -> None:
    parameter, rounds = set_up()
    assert rounds.step() is None
    assert rounds.story == []
    assert parameter.tolist() == [1.0, 1.0]
    assert rounds.core.local_epoch == 0


def test_a_round_averages_and_shows_the_users_values() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    rounds.others = {OTHER: envelope(4, [1, 2]), THIRD: "no envelope"}
    result = rounds.step(averaging_round=True, averaging_opts={"gather": "mine", "weight": 2.0, "timeout": 9.0})
    assert result is not None
    assert dict(result) == {ME: "mine", OTHER: [1, 2], THIRD: "no envelope"}
    assert result.epochs == {ME: 0, OTHER: 4}
    assert result.previous is None
    assert result.group_size == 3
    assert parameter.tolist() == [2.0, 2.0]
    assert rounds.options == [{"gather": envelope(0, "mine"), "weight": 2.0, "timeout": 9.0}]
    assert rounds.core.local_epoch == 0


def test_epochs_follow_the_group_only_if_asked_and_only_sensible_ones() -> None:
    _, rounds = set_up(sync_epoch_when_averaging=True)
    strangers = {
        PeerId(bytes([9 + index]) * 32): envelope(value) for index, value in enumerate([10**6 + 1, True, "7", 2.0, None])
    }
    gone = PeerId(b"g" * 32)
    rounds.excluded = {gone: Exclusion(peer_id=gone, code=ExclusionCode.SILENT, detail="")}
    rounds.others = {OTHER: envelope(5), THIRD: envelope(-3), gone: envelope(50), **strangers}
    result = rounds.step(averaging_round=True)
    assert result is not None
    assert result.epochs == {ME: 0, OTHER: 5, THIRD: -3}
    assert rounds.core.local_epoch == 5


def test_the_schedule_catches_up_after_a_jump() -> None:
    parameter, rounds = set_up(
        sync_epoch_when_averaging=True,
        scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 100.0 - epoch),
    )
    rate = rounds.core.optimizer.param_groups[0]
    pull(parameter, 1.0)
    rounds.step(increment_epoch=True, optimizer_step=True)
    assert rate["lr"] == 99.0
    rounds.others = {OTHER: envelope(7)}
    rounds.step(averaging_round=True)
    assert (rounds.core.local_epoch, rate["lr"]) == (7, 93.0)
    rounds.others = {OTHER: envelope(3)}
    rounds.step(averaging_round=True)
    assert (rounds.core.local_epoch, rate["lr"]) == (7, 93.0)


def test_the_schedule_follows_a_delayed_jump_after_the_optimizer_step() -> None:
    parameter, rounds = set_up(
        sync_epoch_when_averaging=True,
        scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 100.0 - epoch),
    )
    rates: list[float] = []
    rounds.core.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    rounds.others = {OTHER: envelope(7)}
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 0.0)
    rounds.step(optimizer_step=True, increment_epoch=True)
    assert rates == [100.0]
    assert (rounds.core.local_epoch, rounds.core.optimizer.param_groups[0]["lr"]) == (8, 92.0)


def test_a_failed_optimizer_step_leaves_all_as_before_and_raises() -> None:
    parameter, rounds = set_up(scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.1))
    pull(parameter, 1.0)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = rounds.core.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        rounds.step(increment_epoch=True, optimizer_step=True, zero_grad=True, averaging_round=True)
    assert rounds.story == []
    assert rounds.core.local_epoch == 0
    assert rounds.core.optimizer.param_groups[0]["lr"] == 1.0
    assert parameter.grad is not None
    handle.remove()
    rounds.step(increment_epoch=True, optimizer_step=True, zero_grad=True, averaging_round=True)
    assert (rounds.core.local_epoch, rounds.story) == (1, ["round"])
    assert parameter.grad is None


def test_a_failed_round_warns_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    parameter, rounds = set_up()
    rounds.error = MatchmakingError("nobody is there")
    pull(parameter, 1.0)
    with caplog.at_level(logging.WARNING, logger="swarmavg"):
        assert rounds.step(optimizer_step=True, averaging_round=True) is None
    assert parameter.tolist() == [2.0, 2.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nobody is there" in caplog.text


def test_a_failed_round_raises_if_asked() -> None:
    parameter, rounds = set_up(on_averaging_failure="raise")
    rounds.error = AllreduceError("everybody left")
    pull(parameter, 1.0)
    with pytest.raises(AllreduceError, match="everybody left"):
        rounds.step(optimizer_step=True, averaging_round=True)
    assert parameter.tolist() == [2.0, 2.0]


def test_a_failed_delayed_round_is_reported_by_the_call_that_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    parameter, rounds = set_up(on_averaging_failure="raise")
    rounds.error = AllreduceError("everybody left")
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 1.0)
    with pytest.raises(AllreduceError):
        rounds.step(optimizer_step=True)
    assert parameter.tolist() == [1.0, 1.0]
    assert not rounds.core.pending
    rounds.step(optimizer_step=True)
    assert parameter.tolist() == [2.0, 2.0]

    patient_parameter, patient = set_up()
    patient.error = AllreduceError("everybody left")
    patient.step(averaging_round=True, delay_averaging=True)
    pull(patient_parameter, 1.0)
    with caplog.at_level(logging.WARNING, logger="swarmavg"):
        assert patient.step(optimizer_step=True) is None
    assert "everybody left" in caplog.text
    assert patient_parameter.tolist() == [2.0, 2.0]


def test_use_after_close_is_never_just_a_warning() -> None:
    _, rounds = set_up()
    rounds.error = ClosedError("closed")
    with pytest.raises(ClosedError):
        rounds.step(averaging_round=True)


def test_a_bug_in_a_round_is_not_taken_for_a_failed_round() -> None:
    _, rounds = set_up()
    rounds.error = TypeError("not msgpack-able")
    with pytest.raises(TypeError):
        rounds.step(averaging_round=True)


def test_a_delayed_round_is_applied_by_a_later_call() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    assert rounds.step(averaging_round=True, delay_averaging=True, averaging_opts={"gather": "first"}) is None
    assert rounds.step(increment_epoch=True) is None
    assert parameter.tolist() == [1.0, 1.0]
    rounds.finish()
    result = rounds.step()
    assert result is not None
    assert result[ME] == "first"
    assert result.epochs[ME] == 0
    assert parameter.tolist() == [2.0, 2.0]
    assert rounds.step() is None
    assert rounds.story == ["start"]


def test_results_wait_until_they_may_be_applied() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 1.0)
    assert rounds.step(optimizer_step=True, apply_delayed_updates=False) is None
    assert rounds.story == ["start", "wait"]
    assert parameter.tolist() == [2.0, 2.0]
    assert rounds.core.pending
    assert rounds.step() is not None
    assert not rounds.core.pending


@pytest.mark.parametrize("action", ["optimizer_step", "zero_grad", "averaging_round"])
def test_by_default_what_touches_the_model_waits(action: str) -> None:
    parameter, rounds = set_up()
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 0.0)
    rounds.step(**{action: True})
    assert rounds.story[1] == "wait"


def test_a_call_may_wait_for_nothing_but_the_delayed_round() -> None:
    _, rounds = set_up()
    rounds.step(averaging_round=True, delay_averaging=True)
    assert rounds.step(wait_for_delayed_update=True) is not None
    assert rounds.story == ["start", "wait"]


def test_a_call_that_does_both_returns_its_own_and_the_earlier_result() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    rounds.step(averaging_round=True, delay_averaging=True, averaging_opts={"gather": "earlier"})
    result = rounds.step(averaging_round=True, averaging_opts={"gather": "own"})
    assert result is not None
    assert result[ME] == "own"
    assert result.previous is not None
    assert result.previous[ME] == "earlier"
    assert parameter.tolist() == [2.5, 2.5]
    assert rounds.story == ["start", "wait", "round"]


def test_without_the_delta_rule_a_delayed_round_overwrites_local_steps() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    rounds.step(averaging_round=True, delay_averaging=True)
    for _ in range(5):
        pull(parameter, 1.0)
        rounds.step(optimizer_step=True, zero_grad=True, wait_for_delayed_update=False)
    assert parameter.tolist() == [6.0, 6.0]
    rounds.step(wait_for_delayed_update=True)
    assert parameter.tolist() == [2.0, 2.0]


def test_with_the_delta_rule_local_steps_are_kept() -> None:
    parameter, rounds = set_up(delta_rule_averaging=True)
    rounds.theirs = 3.0
    rounds.step(averaging_round=True, delay_averaging=True)
    for _ in range(5):
        pull(parameter, 1.0)
        rounds.step(optimizer_step=True, zero_grad=True, wait_for_delayed_update=False)
    rounds.step(wait_for_delayed_update=True)
    assert parameter.tolist() == [7.0, 7.0]


def test_elements_that_were_not_averaged_keep_what_they_have_become() -> None:
    parameter, rounds = set_up()
    rounds.theirs = 3.0
    rounds.averaged = [Span(0, 1)]
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 1.0)
    rounds.step(optimizer_step=True, wait_for_delayed_update=False)
    rounds.step(wait_for_delayed_update=True)
    assert parameter.tolist() == [2.0, 2.0]
    assert rounds.core.buffers[0].tolist() == [2.0, 2.0]
    pull(parameter, 5.0)
    rounds.step(averaging_round=True, delay_averaging=True)
    rounds.step(optimizer_step=True, wait_for_delayed_update=False)
    rounds.step(wait_for_delayed_update=True)
    assert parameter.tolist() == [2.5, 7.0]


def test_an_auxiliary_peer_is_never_written_to() -> None:
    parameter, rounds = set_up(auxiliary=True)
    rounds.theirs = 3.0
    assert rounds.step(averaging_round=True) is not None
    assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wait_for_delayed_update": False}, "wait_for_delayed_update=False.*averaging_round=True"),
        ({"apply_delayed_updates": False}, "apply_delayed_updates=False.*averaging_round=True"),
    ],
)
def test_no_second_round_while_one_is_pending(arguments: dict[str, Any], message: str) -> None:
    parameter, rounds = set_up()
    rounds.step(averaging_round=True, delay_averaging=True)
    pull(parameter, 1.0)
    with pytest.raises(ValueError, match=message):
        rounds.step(averaging_round=True, optimizer_step=True, increment_epoch=True, **arguments)
    assert rounds.story == ["start"]
    assert parameter.tolist() == [1.0, 1.0]
    assert rounds.core.local_epoch == 0


def test_without_a_pending_round_those_calls_are_fine() -> None:
    _, rounds = set_up()
    assert rounds.step(averaging_round=True, wait_for_delayed_update=False, apply_delayed_updates=False) is not None


def test_a_delayed_round_may_not_write_into_live_parameters() -> None:
    _, rounds = set_up(reuse_tensors=True)
    with pytest.raises(ValueError, match=r"delay_averaging=True.*reuse_tensors=True"):
        rounds.step(averaging_round=True, delay_averaging=True)


def test_parameters_that_came_later_are_not_silently_left_out() -> None:
    _, rounds = set_up()
    rounds.core.optimizer.add_param_group({"params": [one_parameter()]})
    with pytest.raises(ValueError, match="optimizer has 2 parameters, but had 1"):
        rounds.step(averaging_round=True)
    assert rounds.story == []


def test_a_statistic_that_vanished_is_named() -> None:
    parameter = one_parameter()
    settings = TrainingSettings(optimizer=torch.optim.Adam([parameter]), average_opt_statistics=["exp_avg"])
    rounds = FakeRounds(TrainingCore(settings))
    rounds.core.optimizer.state.clear()
    with pytest.raises(ValueError, match=r"0\.exp_avg is gone"):
        rounds.step(averaging_round=True)


def test_closing_forgets_a_pending_round_aloud(caplog: pytest.LogCaptureFixture) -> None:
    _, rounds = set_up()
    rounds.step(averaging_round=True, delay_averaging=True)
    with caplog.at_level(logging.WARNING, logger="swarmavg"):
        assert rounds.core.abandon_pending() is rounds.started
        assert rounds.core.abandon_pending() is None
    assert len(caplog.records) == 1


def test_progress_is_told_at_the_level_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    _, rounds = set_up(status_loglevel="info")
    with caplog.at_level(logging.INFO, logger="swarmavg"):
        rounds.step(averaging_round=True)
    assert "averages applied" in caplog.text
    _, quiet = set_up()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="swarmavg"):
        quiet.step(averaging_round=True)
    assert caplog.text == ""
