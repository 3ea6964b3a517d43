"""What `step` returns, and how epochs travel with a round: beside the user's gather value, in one envelope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swarmavg.control import StepResult
from swarmavg.identifiers import PeerId

EPOCH_REACH = 10**6
"""An epoch further from ours than this is taken for an error or an attack, and not counted."""

_EPOCH = "epoch"
_VALUE = "gather"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingStepResult(StepResult):
    """A finished round of a training averager. As a mapping: the members of the group, each with its own `gather` value."""

    epochs: Mapping[PeerId, int]
    """The epoch of each member that stayed in the round, at its start; members whose epoch makes no sense are missing."""
    previous: TrainingStepResult | None = field(default=None, repr=False)
    """The result of the delayed round that the same call applied, if it did both."""


def wrap_gather(epoch: int, value: Any) -> dict[str, Any]:
    """The value to gather in a round."""
    return {_EPOCH: epoch, _VALUE: value}


def training_result(result: StepResult, epoch: int, previous: TrainingStepResult | None = None) -> TrainingStepResult:
    """A round's result in the terms of training, with the epochs within reach of `epoch`."""
    plain = {name.name: getattr(result, name.name) for name in fields(StepResult)}
    plain["gathered"] = {peer: _user_value(value) for peer, value in result.items()}
    epochs = {peer: value[_EPOCH] for peer, value in result.items() if _has_epoch(value, epoch) and peer not in result.excluded}
    return TrainingStepResult(**plain, epochs=epochs, previous=previous)


def _is_envelope(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_EPOCH, _VALUE}


def _user_value(value: Any) -> Any:
    """What the other side's user gave; a peer that is no training averager sends no envelope."""
    return value[_VALUE] if _is_envelope(value) else value


def _has_epoch(value: Any, ours: int) -> bool:
    if not _is_envelope(value):
        return False
    epoch = value[_EPOCH]
    return isinstance(epoch, int) and not isinstance(epoch, bool) and abs(epoch - ours) <= EPOCH_REACH
