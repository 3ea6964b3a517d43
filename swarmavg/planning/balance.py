"""How much of the vector each member of a group reduces, from everybody's bandwidth.

Pure and exact: rational numbers throughout, so that every member of a group finds the same shares on any machine.

Per unit of vector, a peer that reduces the fraction f moves ``s * (1 - f) + f * (S - s)`` in each direction: s = 1 if it
contributes (it exchanges the rest with the other reducers), S = number of contributors. Over its bandwidth b, that takes

    t = (s + f * (S - 2 * s)) / b.

Raising a level T like water in vessels that start at t(0) = s / b, each reducer takes the f at which it is busy until T, and
the level stands where the fractions sum to 1. The slowest peer then finishes as early as it can; and where somebody else is
the slowest whatever the split (a slow client), the reducers still finish together, as early as *they* can.

With two contributors or fewer, reducing costs a contributor nothing, or even saves: what it reduces it need not send away.
Those share the vector in proportion to bandwidth, and auxiliary peers reduce only if no contributor can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reducer:
    """A peer whose fraction is ``level * rate - offset``."""

    position: int
    rate: Fraction
    offset: Fraction

    def fraction(self, level: Fraction) -> Fraction:
        return level * self.rate - self.offset

    def level(self, fraction: Fraction) -> Fraction:
        return (fraction + self.offset) / self.rate


def balance(
    bandwidths: Sequence[float | None],
    contributes: Sequence[bool],
    reduces: Sequence[bool],
    total: int,
    min_size: int = 0,
) -> tuple[int, ...]:
    """The number of elements that each peer reduces; they sum to `total`.

    `bandwidths` are in any common unit. `None` counts as the mean of those that are known and not 0, or as equal to all
    others if none is. 0 reduces nothing, and that peer's own time does not count. Peers that would get fewer than `min_size`
    elements get none, as long as somebody is left: they leave one at a time, and the others share again. Equal peers are told
    apart by position, in favour of the earlier.

    Raises `ValueError` for a bandwidth, total or size out of range, for sequences of unequal length, and when nobody can
    reduce; `TypeError` for a bandwidth that is no number. Takes O(n log n) operations on rational numbers.
    """
    if not len(bandwidths) == len(contributes) == len(reduces):
        raise ValueError(
            "bandwidths, contributes and reduces must be equally long, "
            f"not {len(bandwidths)}, {len(contributes)} and {len(reduces)}"
        )
    if total < 0 or min_size < 0:
        raise ValueError(f"total={total!r} and min_size={min_size!r} must not be negative")
    candidates = _reducers(_known(bandwidths), contributes, reduces)
    if not candidates:
        raise ValueError(f"nobody can reduce: reduces={list(reduces)!r}, bandwidths={list(bandwidths)!r}")
    if total == 0:
        return (0,) * len(bandwidths)
    # Where no two can have `min_size`, the one who needs least time for all of it does all of it.
    fewest = total if 2 * min_size > total else min_size
    return _rounded(_fill(candidates, Fraction(fewest, total)), total, len(bandwidths))


def _known(bandwidths: Sequence[float | None]) -> list[Fraction]:
    for position, value in enumerate(bandwidths):
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"bandwidths[{position}]={value!r} is neither a number nor None")
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"bandwidths[{position}]={value!r} is not a finite number of at least 0")
    known = [Fraction(value) for value in bandwidths if value]
    mean = sum(known, Fraction(0)) / len(known) if known else Fraction(1)
    return [mean if value is None else Fraction(value) for value in bandwidths]


def _reducers(bandwidths: Sequence[Fraction], contributes: Sequence[bool], reduces: Sequence[bool]) -> list[_Reducer]:
    able = [position for position, bandwidth in enumerate(bandwidths) if reduces[position] and bandwidth]
    contributors = sum(map(bool, contributes))
    if contributors <= 2:
        for_free = [position for position in able if contributes[position]]
        return [_Reducer(position=p, rate=bandwidths[p], offset=Fraction(0)) for p in for_free or able]
    reducers = []
    for position in able:
        own = 1 if contributes[position] else 0
        slope = contributors - 2 * own
        reducers.append(_Reducer(position=position, rate=bandwidths[position] / slope, offset=Fraction(own, slope)))
    return reducers


def _fill(candidates: Sequence[_Reducer], fewest: Fraction) -> dict[int, Fraction]:
    """Fractions by position, each at least `fewest` unless there is only one.

    Peers join in the order of the level at which their fraction reaches `fewest`, until one more would leave somebody with
    less. Each who joins lowers the level and asks for a higher one than all before, so the first misfit ends it.
    """
    queue = sorted((reducer.level(fewest), reducer.position, reducer) for reducer in candidates)
    joined: list[_Reducer] = []
    rate = offset = level = Fraction(0)
    for needed, _, reducer in queue:
        rate, offset = rate + reducer.rate, offset + reducer.offset
        if joined and (1 + offset) / rate < needed:
            break
        level = (1 + offset) / rate
        joined.append(reducer)
    return {reducer.position: reducer.fraction(level) for reducer in joined}


def _rounded(fractions: dict[int, Fraction], total: int, length: int) -> tuple[int, ...]:
    """Largest remainders: whole elements first, then one each to those who lost most by rounding down."""
    exact = {position: fraction * total for position, fraction in fractions.items()}
    shares = [math.floor(exact.get(position, 0)) for position in range(length)]
    by_loss = sorted(exact, key=lambda position: (shares[position] - exact[position], position))
    for position in by_loss[: total - sum(shares)]:
        shares[position] += 1
    return tuple(shares)
