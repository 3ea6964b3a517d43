"""Training averagers in careless and hostile hands: what cannot be right is refused before anything is done."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from swarmavg.control import StepResult
from swarmavg.errors import BlockingCallError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.planning.partition import Span
from swarmavg.training.actions import drive_blocking
from swarmavg.training.core import TrainingCore
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.settings import RoundOptions, StepCall, TrainingSettings

ME, OTHER = (PeerId(bytes([number]) * 32) for number in (1, 2))


class Rounds:
    """Rounds with one peer that holds zeros everywhere, and sends whatever it likes to gather."""

    def __init__(self, core: TrainingCore) -> None:
        self.core = core
        self.sent: Any = None
        self.error: BaseException | None = None
        self.count = 0

    def run(self, options: RoundOptions) -> StepResult:
        self.count += 1
        if self.error is not None:
            raise self.error
        for buffer in self.core.buffers:
            buffer.mul_(0.5)
        return StepResult(
            gathered={ME: options["gather"], OTHER: self.sent},
            round_id=GroupId.random(),
            contributors=[(Span(0, sum(buffer.numel() for buffer in self.core.buffers)), (ME, OTHER))],
            missing=[],
            fraction=1.0,
            excluded={},
            bytes_sent=1,
            bytes_received=1,
            matchmaking_seconds=0.0,
            allreduce_seconds=0.0,
        )

    def start(self, options: RoundOptions) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(self.run(options))
        return future

    def wait(self, background: object) -> None:
        pass

    def step(self, **arguments: Any) -> TrainingStepResult | None:
        return drive_blocking(self.core.step_sequence(StepCall(**arguments)), self)


def sgd(*parameters: torch.Tensor, **arguments: Any) -> Rounds:
    return Rounds(TrainingCore(TrainingSettings(optimizer=torch.optim.SGD(parameters, lr=1.0), **arguments)))


def ones() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


@pytest.mark.parametrize("delta", [False, True])
def test_what_shares_memory_with_a_parameter_is_not_averaged_twice(delta: bool) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra_tensors\[\d\] shares memory"):
        sgd(*model.parameters(), extra_tensors=list(model.state_dict().values()), delta_rule_averaging=delta)
    weight = ones()
    with pytest.raises(ValueError, match="parameter '1' shares memory"):
        sgd(weight, nn.Parameter(weight.data), delta_rule_averaging=delta)


def test_neighbours_in_one_block_of_memory_are_fine() -> None:
    block = torch.ones(3, 4)
    rounds = sgd(nn.Parameter(block[0]), nn.Parameter(block[1:, ::2]), extra_tensors=[block[1:, 1::2]])
    rounds.step(averaging_round=True)
    assert block.eq(0.5).all()


def test_an_extra_tensor_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match=r"extra_tensors\[0\] is an expanded view"):
        sgd(ones(), extra_tensors=[torch.zeros(1).expand(4)])


def test_a_model_that_was_converted_is_refused_before_it_is_trained() -> None:
    model = nn.Linear(2, 2)
    rounds = sgd(*model.parameters())
    model.to(torch.bfloat16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"parameter '0' has changed.*float32 of shape.*bfloat16"):
        rounds.step(increment_epoch=True, optimizer_step=True, zero_grad=True, averaging_round=True)
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert rounds.core.local_epoch == rounds.count == 0


def test_an_optimizer_that_was_given_other_parameters_is_not_averaged_without_them() -> None:
    rounds = sgd(ones())
    rounds.core.optimizer.param_groups[0]["params"][0] = ones()
    with pytest.raises(ValueError, match="other parameters"):
        rounds.step(averaging_round=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gather": object()}, TypeError, "gather=.*cannot be packed"),
        ({"gather": b"x" * 100_000}, ValueError, "gather packs to"),
        ({"scheduled_time": "soon"}, TypeError, r"averaging_opts\['scheduled_time'\]"),
        ({"scheduled_time": math.nan}, ValueError, r"averaging_opts\['scheduled_time'\]"),
        ({"allow_retries": "no"}, TypeError, r"averaging_opts\['allow_retries'\]"),
    ],
)
def test_what_a_round_would_refuse_is_refused_before_the_optimizer_steps(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    weight = ones()
    rounds = sgd(weight)
    with pytest.raises(error, match=words):
        rounds.step(optimizer_step=True, averaging_round=True, averaging_opts=options)
    assert weight.tolist() == [1.0, 1.0]


def test_a_schedule_after_the_deadline_is_refused_by_the_shells_with_their_clock() -> None:
    call = StepCall(averaging_round=True, averaging_opts={"timeout": 1.0, "scheduled_time": 105.0})
    with pytest.raises(ValueError, match="scheduled_time=105"):
        call.check_schedule(100.0)
    call.check_schedule(104.5)
    StepCall(averaging_round=True, averaging_opts={"scheduled_time": 105.0}).check_schedule(100.0)
    StepCall().check_schedule(100.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"extra_tensors": 5}, "extra_tensors.*got 5"),
        ({"extra_tensors": None}, "extra_tensors.*got None"),
        ({"average_opt_statistics": None}, "average_opt_statistics.*got None"),
        ({"params": 5}, "params.*got 5"),
    ],
)
def test_things_that_are_no_sequences_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        sgd(ones(), **arguments)


def test_a_step_within_a_step_is_never_taken_for_a_failed_round() -> None:
    rounds = sgd(ones(), on_averaging_failure="warn")
    rounds.error = BlockingCallError("step was called within a step")
    with pytest.raises(BlockingCallError):
        rounds.step(averaging_round=True)


@pytest.mark.parametrize(
    "sent",
    [
        *({"epoch": epoch, "gather": "x"} for epoch in ("9", 2**63, 10**6 + 1, -5, math.nan, math.inf, True, None, [1], 2.0)),
        *(None, 5, "x", [], {"epoch": 3}, {"epoch": 3, "gather": 1, "more": 1}, {1: 2}, {b"epoch": 3, b"gather": 1}),
    ],
    ids=repr,
)
def test_no_epoch_is_taken_from_a_gather_value_that_makes_no_sense(sent: Any) -> None:
    rounds = sgd(ones(), sync_epoch_when_averaging=True)
    rounds.sent = sent
    result = rounds.step(averaging_round=True)
    assert result is not None
    assert rounds.core.local_epoch == 0
    assert OTHER in result
