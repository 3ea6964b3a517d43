"""The steps of a `step`: what a training core asks its shell to do, and the shell for a plain thread.

A core writes the order of actions once, as a generator. Whoever drives it decides in which thread model tensors are touched
and how a round is run: the blocking shell here does everything but the rounds in the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, assert_never

from swarmavg.control import StepResult
from swarmavg.training.results import TrainingStepResult
from swarmavg.training.settings import RoundOptions


class BackgroundRound(Protocol):
    """A round that runs beside the training loop."""

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Once it is done: its result, or what it raised; `ClosedError` for one that was cancelled."""


@dataclass(frozen=True, slots=True)
class TouchModel:
    """Call `work` where the model's tensors may be touched. Answer: nothing."""

    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class RunRound:
    """Run a round to its end. Answer: its `StepResult`."""

    options: RoundOptions


@dataclass(frozen=True, slots=True)
class StartRound:
    """Start a round in the background. Answer: its `BackgroundRound`."""

    options: RoundOptions


@dataclass(frozen=True, slots=True)
class WaitForRound:
    """Wait until a background round is done, however it ends. Answer: nothing."""

    background: BackgroundRound


Action: TypeAlias = TouchModel | RunRound | StartRound | WaitForRound
StepSequence: TypeAlias = Generator[Action, Any, TrainingStepResult | None]
"""The actions of one step. What an action raises is thrown in where it was asked for."""


class BlockingRounds(Protocol):
    """How a thread without an event loop runs rounds."""

    def run(self, options: RoundOptions) -> StepResult:
        """Run a round and return its result, or raise what it raised. Interrupted, it cancels the round and awaits its end."""

    def start(self, options: RoundOptions) -> BackgroundRound: ...

    def wait(self, background: BackgroundRound) -> None:
        """Until the round is done. Does not raise what the round raised."""


def drive_blocking(sequence: StepSequence, rounds: BlockingRounds) -> TrainingStepResult | None:
    """Run a step in the calling thread: model tensors are touched here alone."""
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
            answer = _perform(action, rounds)
        except BaseException as raised:  # noqa: BLE001  (nothing is swallowed: the sequence re-raises what it does not handle)
            error = raised


def _perform(action: Action, rounds: BlockingRounds) -> Any:
    match action:
        case TouchModel(work):
            return work()
        case RunRound(options):
            return rounds.run(options)
        case StartRound(options):
            return rounds.start(options)
        case WaitForRound(background):
            return rounds.wait(background)
        case _:
            assert_never(action)
