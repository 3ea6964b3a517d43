"""The states of matchmaking, what may follow what, and the diagram drawn from it.

`TRANSITIONS` is the whole truth: a move that is not in it is a bug here (`LocalProtocolError`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class State(enum.Enum):
    IDLE = "idle"
    """Not looking."""
    SEARCHING = "searching"
    """Looking, with nobody to join yet and not leading (a moment, except for clients)."""
    LEADING = "leading"
    """Looking, best placed as far as it knows: takes joins, decides when the group begins."""
    JOINING = "joining"
    """A join is out, unanswered. Followers from before are kept until it is accepted."""
    FOLLOWING = "following"
    """Accepted by a leader; the lease is renewed until the begin comes."""
    IN_ROUND = "in_round"
    """A group stands."""
    CLOSED = "closed"

    @property
    def looks(self) -> bool:
        return self in _LOOKING


class Cause(enum.Enum):
    LOOK = "look"
    LEAD = "nobody better to join"
    JOIN = "a better leader is known"
    ACCEPTED = "accepted"
    PARTED = "refused, redirected, released, or leader silent"
    BEGIN_SENT = "begin sent"
    BEGIN_RECEIVED = "begin received or adopted"
    STOP = "deadline or cancel"
    FINISHED = "round finished"
    CLOSE = "close"


_LOOKING: Final = frozenset({State.SEARCHING, State.LEADING, State.JOINING, State.FOLLOWING})

TRANSITIONS: Final[Mapping[tuple[State, Cause], State]] = MappingProxyType(
    {
        (State.IDLE, Cause.LOOK): State.SEARCHING,
        (State.SEARCHING, Cause.LEAD): State.LEADING,
        (State.SEARCHING, Cause.JOIN): State.JOINING,
        (State.LEADING, Cause.JOIN): State.JOINING,
        (State.JOINING, Cause.ACCEPTED): State.FOLLOWING,
        (State.JOINING, Cause.PARTED): State.SEARCHING,
        (State.FOLLOWING, Cause.PARTED): State.SEARCHING,
        (State.LEADING, Cause.BEGIN_SENT): State.IN_ROUND,
        (State.SEARCHING, Cause.BEGIN_RECEIVED): State.IN_ROUND,  # of a leader that was lost, from a groupmate
        (State.LEADING, Cause.BEGIN_RECEIVED): State.IN_ROUND,
        (State.JOINING, Cause.BEGIN_RECEIVED): State.IN_ROUND,
        (State.FOLLOWING, Cause.BEGIN_RECEIVED): State.IN_ROUND,
        (State.SEARCHING, Cause.STOP): State.IDLE,
        (State.LEADING, Cause.STOP): State.IDLE,
        (State.JOINING, Cause.STOP): State.IDLE,
        (State.FOLLOWING, Cause.STOP): State.IDLE,
        (State.IN_ROUND, Cause.FINISHED): State.IDLE,
        (State.IDLE, Cause.CLOSE): State.CLOSED,
        (State.SEARCHING, Cause.CLOSE): State.CLOSED,
        (State.LEADING, Cause.CLOSE): State.CLOSED,
        (State.JOINING, Cause.CLOSE): State.CLOSED,
        (State.FOLLOWING, Cause.CLOSE): State.CLOSED,
        (State.IN_ROUND, Cause.CLOSE): State.CLOSED,
    }
)


def state_diagram() -> str:
    """The table as a mermaid state diagram; edges that share both ends share one label. `close` is left out: it always may."""
    labels: dict[tuple[State, State], list[str]] = {}
    for (before, cause), after in TRANSITIONS.items():
        if cause is not Cause.CLOSE:
            labels.setdefault((before, after), []).append(cause.value)
    lines = ["stateDiagram-v2", "    [*] --> idle"]
    lines += [f"    {a.value} --> {b.value}: {'; '.join(causes)}" for (a, b), causes in labels.items()]
    return "\n".join(lines)
