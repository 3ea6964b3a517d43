"""What happened in a simulated run, as plain facts: built-in types and numpy arrays, nothing of the product.

The tests' harness writes it down and `swarmavg.testing.oracle` judges it. Peers are named by strings that the harness makes up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = tuple[NDArray[Any], ...]
"""One array per averaged tensor, of its dtype: copies, that nobody changes any more."""

KILL: Final = "kill"
FREEZE: Final = "freeze"
CUT: Final = "cut"
STALL: Final = "stall"
SLOW: Final = "slow"
CORRUPT: Final = "corrupt"
CLOCK: Final = "clock"
LEAVE: Final = "leave"

FAULT_KINDS: Final = frozenset({KILL, FREEZE, CUT, STALL, SLOW, CORRUPT, CLOCK, LEAVE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepStarted:
    """A peer has called `step`. Its values stay as they are until the step ends."""

    peer: str
    step: int
    """Number of the step among those of this peer. The peer gathers it, so that results say whose which step they include."""
    time: float
    role: str
    """``node``, ``client`` or ``auxiliary``."""
    weight: float
    alpha: float
    values: Values
    deadline: float
    """Virtual time by which the call must have ended, whatever happens."""

    @property
    def contributes(self) -> bool:
        return self.role != "auxiliary" and self.weight > 0

    @property
    def receives(self) -> bool:
        return self.role != "auxiliary"

    @property
    def reduces(self) -> bool:
        return self.role != "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultApplied:
    """Something was done to one peer, or to the links between two."""

    kind: str
    peers: tuple[str, ...]
    time: float
    seconds: float = float("inf")
    """How long it lasted."""

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"kind must be one of {sorted(FAULT_KINDS)}, got {self.kind!r}")

    @property
    def until(self) -> float:
        return self.time + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What the step's result says."""

    round_id: str
    members: dict[str, int]
    """The group: peers, and the number of the step that each of them was in."""
    spans: tuple[tuple[int, int, frozenset[str]], ...]
    """Elements [start, stop) and who is in their average, in the order of the result."""
    missing: tuple[tuple[int, int], ...]
    fraction: float
    excluded: frozenset[str]
    diverged: bool
    """As the result says at the end of the run: it may be found out late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The step has raised."""

    error: str
    """Name of the exception's type."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEnded:
    """A call of `step` has returned or raised."""

    peer: str
    step: int
    time: float
    outcome: Finished | Failed
    values: Values
    """What the tensors held right then."""


@dataclass(kw_only=True)
class EventLog:
    """The facts of one run, and what the settings of that run say about how long and how exactly.

    Arguments:
        patience: a trouble between peers that passes within so many seconds must go unnoticed.
        grouping: live peers that look for each other for so many seconds must find each other.
        codec_relative, codec_absolute: error of one round trip through the codec, relative to an element and absolute.
    """

    patience: float
    grouping: float
    codec_relative: float = 0.0
    codec_absolute: float = 0.0
    starts: list[StepStarted] = field(default_factory=list)
    ends: list[StepEnded] = field(default_factory=list)
    faults: list[FaultApplied] = field(default_factory=list)


def copied(values: Any) -> Values:
    """Copies of arrays, of whatever numpy can read as one (CPU tensors too)."""
    return tuple(np.asarray(value).copy() for value in values)
