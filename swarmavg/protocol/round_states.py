"""The states of one member in one round, what may follow what, and the diagram drawn from it.

`TRANSITIONS` is the whole truth: a move that is not in it is a bug here (`LocalProtocolError`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class RoundState(enum.Enum):
    RUNNING = "running"
    """Inputs and results flow."""
    FROZEN = "frozen"
    """A fence came and the report is out: nothing may be committed before the assignments are there."""
    SERVING = "serving"
    """Committed; results are kept for those who still lack some."""
    RECALLED = "recalled"
    """Committed, and a fence came: what is held was reported."""
    CLOSED = "closed"
    """The coordinator said that everybody has everything."""
    FENCED = "fenced"
    """The others went on without this member, which had not committed: its tensors stay as they were."""
    DIVERGED = "diverged"
    """The others went on without this member after it had committed."""
    ORPHANED = "orphaned"
    """Nobody is left who could coordinate: what is held is all there will be."""
    LEFT = "left"
    """This member gave the round up."""

    @property
    def over(self) -> bool:
        return self in _OVER

    @property
    def committed(self) -> bool:
        return self in _COMMITTED

    @property
    def frozen(self) -> bool:
        return self in (RoundState.FROZEN, RoundState.RECALLED)


class RoundCause(enum.Enum):
    FENCE = "fence"
    ASSIGN = "assignments"
    COMMIT = "commit"
    CLOSE = "everybody has everything"
    OUT = "fenced out"
    ORPHAN = "no coordinator left"
    LEAVE = "leave"


_OVER: Final = frozenset({RoundState.CLOSED, RoundState.FENCED, RoundState.DIVERGED, RoundState.ORPHANED, RoundState.LEFT})
_COMMITTED: Final = frozenset({RoundState.SERVING, RoundState.RECALLED, RoundState.DIVERGED})

TRANSITIONS: Final[Mapping[tuple[RoundState, RoundCause], RoundState]] = MappingProxyType(
    {
        (RoundState.RUNNING, RoundCause.FENCE): RoundState.FROZEN,
        (RoundState.FROZEN, RoundCause.FENCE): RoundState.FROZEN,
        (RoundState.FROZEN, RoundCause.ASSIGN): RoundState.RUNNING,
        (RoundState.RUNNING, RoundCause.COMMIT): RoundState.SERVING,
        (RoundState.SERVING, RoundCause.FENCE): RoundState.RECALLED,
        (RoundState.RECALLED, RoundCause.FENCE): RoundState.RECALLED,
        (RoundState.RECALLED, RoundCause.ASSIGN): RoundState.SERVING,
        (RoundState.SERVING, RoundCause.CLOSE): RoundState.CLOSED,
        (RoundState.RUNNING, RoundCause.CLOSE): RoundState.CLOSED,  # a member that receives nothing
        (RoundState.RUNNING, RoundCause.OUT): RoundState.FENCED,
        (RoundState.FROZEN, RoundCause.OUT): RoundState.FENCED,
        (RoundState.SERVING, RoundCause.OUT): RoundState.DIVERGED,
        (RoundState.RECALLED, RoundCause.OUT): RoundState.DIVERGED,
        (RoundState.RUNNING, RoundCause.ORPHAN): RoundState.ORPHANED,
        (RoundState.FROZEN, RoundCause.ORPHAN): RoundState.ORPHANED,
        (RoundState.SERVING, RoundCause.ORPHAN): RoundState.CLOSED,
        (RoundState.RECALLED, RoundCause.ORPHAN): RoundState.CLOSED,
        (RoundState.RUNNING, RoundCause.LEAVE): RoundState.LEFT,
        (RoundState.FROZEN, RoundCause.LEAVE): RoundState.LEFT,
        (RoundState.SERVING, RoundCause.LEAVE): RoundState.LEFT,
        (RoundState.RECALLED, RoundCause.LEAVE): RoundState.LEFT,
    }
)


def round_diagram() -> str:
    """The table as a mermaid state diagram. `leave` is left out: it always may, and ends in `left`."""
    labels: dict[tuple[RoundState, RoundState], list[str]] = {}
    for (before, cause), after in TRANSITIONS.items():
        if cause is not RoundCause.LEAVE:
            labels.setdefault((before, after), []).append(cause.value)
    lines = ["stateDiagram-v2", "    [*] --> running"]
    lines += [f"    {a.value} --> {b.value}: {'; '.join(causes)}" for (a, b), causes in labels.items()]
    return "\n".join(lines)
