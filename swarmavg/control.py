"""What `Averager.step` gives back: a handle on the step while it runs, and the result when it has ended."""

from __future__ import annotations

import asyncio
import enum
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarmavg.config import check_number
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.planning.partition import Span
from swarmavg.protocol.outcome import Exclusion, RoundFate
from swarmavg.reduction.reducer import MAX_WEIGHT, MIN_WEIGHT


class AveragingStage(enum.Enum):
    """How far a step has come."""

    IDLE = "idle"
    LOOKING_FOR_GROUP = "looking for group"
    AWAITING_TRIGGER = "awaiting trigger"
    RUNNING_ALLREDUCE = "running all-reduce"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult(Mapping[PeerId, Any]):
    """A finished step. As a mapping: the members of the group, each with its `gather` value."""

    gathered: Mapping[PeerId, Any] = field(repr=False)
    round_id: GroupId
    contributors: Sequence[tuple[Span, tuple[PeerId, ...]]]
    """Who is in the average of which elements; sorted spans. Nobody where all weights were 0."""
    missing: Sequence[Span]
    """Elements that could not be averaged and keep their local values."""
    fraction: float
    """Fraction of the elements that were averaged."""
    excluded: Mapping[PeerId, Exclusion]
    """Members that were left out of the round or of a part of it, and why."""
    bytes_sent: int
    """Payload bytes, when the result was made."""
    bytes_received: int
    matchmaking_seconds: float
    allreduce_seconds: float
    attempts: int = 1
    """Groups that were tried, this one included."""
    fate: RoundFate = field(default_factory=RoundFate, repr=False)
    """What became of the round after this result was made; see `diverged`."""

    @property
    def diverged(self) -> bool:
        """Whether the others turned out to have gone on without this peer after it had written these averages.

        Their averages may then differ from the ones here. It may become True some seconds after the step, while the round is
        still serving slower members.
        """
        return self.fate.diverged

    @property
    def group_size(self) -> int:
        return len(self.gathered)

    def __getitem__(self, peer_id: PeerId) -> Any:
        return self.gathered[peer_id]

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self.gathered)

    def __len__(self) -> int:
        return len(self.gathered)


class StepState:
    """What the step's task and its `StepControl` share. Internal: users hold a `StepControl`."""

    def __init__(self, *, weight: float, scheduled_time: float | None, deadline: float, triggered: bool) -> None:
        self.weight = weight
        self.scheduled_time = scheduled_time
        self.deadline = deadline
        self.stage = AveragingStage.IDLE
        self.began_allreduce = False
        self.progress: Callable[[], float] = lambda: 0.0
        self.schedule_changed = asyncio.Event()
        self.trigger = asyncio.Event()
        if triggered:
            self.trigger.set()

    def may_begin_now(self) -> bool:
        """Triggered, and not scheduled for later."""
        now = asyncio.get_running_loop().time()
        return self.trigger.is_set() and (self.scheduled_time is None or self.scheduled_time <= now)


class StepControl:
    """A step that runs in the background: await it for its `StepResult`.

    Until the all-reduce begins, `weight` and `scheduled_time` may be set; later that warns and changes nothing.
    """

    def __init__(self, state: StepState, task: asyncio.Task[StepResult]) -> None:
        self._state = state
        self._task = task
        self._warning = weakref.finalize(self, _warn_untriggered, state, task)
        self._warning.atexit = False

    def __await__(self) -> Generator[Any, None, StepResult]:
        """The result, or the step's exception. Cancelling the waiter does not cancel the step."""
        return asyncio.shield(self._task).__await__()

    @property
    def stage(self) -> AveragingStage:
        return AveragingStage.FINISHED if self._task.done() else self._state.stage

    @property
    def deadline(self) -> float:
        """Loop time by which the step ends; `math.inf` if never."""
        return self._state.deadline

    @property
    def began_allreduce(self) -> bool:
        return self._state.began_allreduce

    @property
    def progress(self) -> float:
        """Fraction of the elements whose results are in."""
        return self._state.progress()

    @property
    def weight(self) -> float:
        return self._state.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        checked = check_weight_argument(weight)
        if self._may_change("weight"):
            self._state.weight = checked

    @property
    def scheduled_time(self) -> float | None:
        """Loop time before which the all-reduce does not begin; `None` = as soon as possible."""
        return self._state.scheduled_time

    @scheduled_time.setter
    def scheduled_time(self, moment: float | None) -> None:
        checked = check_scheduled_time(moment, self._state.deadline, self._task.get_loop().time())
        if self._may_change("scheduled_time"):
            self._state.scheduled_time = checked
            self._state.schedule_changed.set()

    @property
    def triggered(self) -> bool:
        return self._state.trigger.is_set()

    def allow_allreduce(self) -> None:
        """Let the all-reduce begin once the group stands. A second call only warns."""
        if self._state.trigger.is_set():
            warnings.warn("allow_allreduce: this step had been triggered before", stacklevel=2)
        self._state.trigger.set()

    def cancel(self) -> bool:
        """Leave the step; the group is told, and the tensors stay as they are. False if it had ended."""
        return self._task.cancel()

    def cancelled(self) -> bool:
        return self._task.cancelled()

    def done(self) -> bool:
        return self._task.done()

    def __repr__(self) -> str:
        return f"<StepControl {self.stage.value}, weight={self.weight:g}, progress={self.progress:.0%}>"

    def _may_change(self, name: str) -> bool:
        if self._state.began_allreduce or self._task.done():
            warnings.warn(f"{name} was set after the all-reduce began: no effect", stacklevel=3)
            return False
        return True


def _warn_untriggered(state: StepState, task: asyncio.Task[StepResult]) -> None:
    if not state.trigger.is_set() and not task.done():
        warnings.warn(
            "a StepControl with require_trigger=True was dropped before allow_allreduce(): its group waits for it",
            ResourceWarning,
            stacklevel=2,
        )


def check_weight_argument(weight: object, name: str = "weight") -> float:
    """A finite number, 0 or of a sane magnitude. Raises `TypeError` or `ValueError`."""
    value = check_number(name, weight, least=0.0)
    if value and not MIN_WEIGHT <= value <= MAX_WEIGHT:
        raise ValueError(f"{name} must be 0 or between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}, got {weight!r}")
    return value


A_YEAR = 365 * 86400.0


def check_scheduled_time(moment: object, deadline: float, now: float) -> float | None:
    """A moment of the event loop's clock before the deadline, or `None`."""
    if moment is None:
        return None
    value = check_number("scheduled_time", moment)
    if value > now + A_YEAR:
        raise ValueError(
            f"scheduled_time={value:g} is over a year ahead: it is a moment of time.monotonic(), not of time.time()"
        )
    if value >= deadline:
        raise ValueError(
            f"scheduled_time={value:g} is not before the step's deadline {deadline:g} "
            "(both on the event loop's clock, time.monotonic())"
        )
    return value
