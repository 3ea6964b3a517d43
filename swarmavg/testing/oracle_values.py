"""The oracle's arithmetic: weighted means in float64, how far off a result may be, and comparison bit by bit."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarmavg.testing.event_log import EventLog, StepStarted, Values

_TINY: Final = 1e-37
"""Absolute slack for numbers so small that float32 holds them with fewer bits, or not at all."""


def mean(
    log: EventLog, step: StepStarted, chosen: list[StepStarted], where: slice
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The elements that the step should have left, and how far off arithmetic and codec may leave them."""
    weights = np.array([start.weight for start in chosen])
    inputs = np.stack([flat(start.values)[where] for start in chosen])
    shares = (weights / weights.sum())[:, None]
    average, scale = (shares * inputs).sum(axis=0), (shares * np.abs(inputs)).sum(axis=0)
    local, alpha = flat(step.values)[where], step.alpha
    stored, summed = _epsilons(step.values)
    codec = 1.01 * (log.codec_relative * (scale + np.abs(average)) + 2 * log.codec_absolute)
    bound = (len(chosen) + 3) * summed[where] * scale + stored[where] * np.abs(average) + codec + _TINY
    if alpha != 1.0:
        average, bound = (
            local + alpha * (average - local),
            alpha * bound + 4 * stored[where] * (np.abs(local) + np.abs(average)),
        )
    return average, bound


def flat(values: Values) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *(array.reshape(-1).astype(np.float64) for array in values)])


def _epsilons(values: Values) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each element: the relative step of what it is stored in, and of what it is summed up in."""
    stored = [np.full(array.size, float(np.finfo(array.dtype).eps)) for array in values]
    summed = [np.minimum(each, float(np.finfo(np.float32).eps)) for each in stored]
    return np.concatenate([np.zeros(0), *stored]), np.concatenate([np.zeros(0), *summed])


def same_bits(one: Values, other: Values) -> NDArray[np.bool_]:
    """Of each element, whether the two hold the same bits."""
    pairs = zip(one, other, strict=True)
    return np.concatenate([np.zeros(0, dtype=bool), *(_bits(first) == _bits(second) for first, second in pairs)])


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
