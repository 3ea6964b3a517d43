"""What the demo's processes tell each other: one JSON object a line, over the children's standard input and output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """To a child, its first line. `peer` is its number, or `None` for the one that trains on everything."""

    peer: int | None
    peers: int
    steps: int
    seed: int
    scheme: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """To a peer, when another one is there: where to find the swarm."""

    bootstrap: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """From a child: what it has to train on."""

    examples: int
    digits: Sequence[int]
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """From the first peer: where it can be reached."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """From a child, now and then. `group` and `megabytes_per_second` are of the averaging round just finished, if any."""

    step: int
    epoch: int
    loss: float
    accuracy: float
    group: int | None = None
    megabytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAlone:
    """From a child: what its own data taught it."""

    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTogether:
    """From a peer, after its last averaging round. `digest` is the sha256 of its parameters."""

    accuracy: float
    digest: str


ToChild: TypeAlias = Setup | Join
FromChild: TypeAlias = Ready | Listening | Progress | TrainedAlone | TrainedTogether

_KINDS: Final[dict[str, type[ToChild | FromChild]]] = {
    kind.__name__: kind for kind in (Setup, Join, Ready, Listening, Progress, TrainedAlone, TrainedTogether)
}


def encode(message: ToChild | FromChild) -> str:
    """One line, without its end."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def decode(line: str) -> ToChild | FromChild:
    """What `encode` made. Raises `ValueError` that quotes any other line."""
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message of the demo: {line!r}") from error
