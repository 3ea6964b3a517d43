"""One peer's range: parts are added as they arrive, and a part is done when every live contributor has delivered it.

Computation only: no channels, no clock. Contributors deliver the parts of the range in order, so how far each has come is a
number, and parts finish in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from swarmavg.compression.buffers import bytes_of
from swarmavg.errors import RemoteProtocolError
from swarmavg.planning.partition import Layout, Part

MAX_WEIGHT = 1e18
MIN_WEIGHT = 1e-18
"""Weights other than 0 lie between these, so that products with values up to about 1e20 stay finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The average of one part, encoded once for everybody."""

    part: Part
    contributors: int
    """Bit p set = the member at position p is in this average. 0 = all weights are 0: keep what you have."""
    payload: memoryview
    """Empty when `contributors` is 0. A view into the accumulator: valid as long as the reducer is."""


class RangeReducer:
    """Weighted mean of given parts: sum(w_i * x_i) / sum(w_i), in float32 or wider. A part's index is its place in `parts`.

    `memory` is a byte tensor of at least `accumulator_bytes`, reused between rounds by the caller. A finished part's
    encoding replaces its sums there, so that results cost no memory of their own and can be passed on later.

    With `reject_nonfinite`, a part that holds NaN or an infinity is refused, and the contributor's earlier parts stay in.
    Finite inputs may still make an infinite average, if a sum exceeds the accumulator's dtype: it is what the arithmetic gives.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[Part],
        contributors: Iterable[int],
        memory: torch.Tensor,
        *,
        reject_nonfinite: bool = True,
    ) -> None:
        self._layout = layout
        self.parts = tuple(parts)
        self._reject_nonfinite = reject_nonfinite
        self._weights: dict[int, float] = {}
        self._awaited: set[int] = set(contributors)
        self._progress: dict[int, int] = dict.fromkeys(self._awaited, 0)
        self._touched = 0  # parts below it hold a sum already
        self.results: list[PartResult] = []
        self._sums = _carve(layout, self.parts, memory)

    @staticmethod
    def accumulator_bytes(layout: Layout, parts: Iterable[Part]) -> int:
        """Bytes of `memory` that the parts need."""
        return sum(len(part) * layout.runs[part.run].accumulator_dtype.itemsize for part in parts)

    @property
    def finished(self) -> bool:
        """Whether every part has its result."""
        return len(self.results) == len(self.parts)

    def waiting_for(self) -> list[int]:
        """Positions of the live contributors that hold up the next part."""
        return [position for position in sorted(self._awaited) if self._behind(position)]

    def delivered(self, position: int) -> bool:
        """Whether a contributor has delivered all it has to: every part, or its weight of 0."""
        return self._weights.get(position) == 0 or self._progress[position] == len(self.parts)

    def begin(self, position: int, weight: float) -> None:
        """Set a contributor's weight, once, before its first part. A weight of 0 delivers no parts.

        Raises `RemoteProtocolError` for a weight out of range and for a second call.
        """
        if position in self._weights:
            raise RemoteProtocolError(f"the weight was given twice: {self._weights[position]!r}, then {weight!r}")
        check_weight(weight)
        self._weights[position] = weight
        if weight == 0:
            self._awaited.discard(position)
            self._finish_parts()

    def expected_payload(self, position: int, index: int) -> int:
        """Bytes that the next part of a contributor must have. Raises `RemoteProtocolError` if `index` is not its next."""
        if position not in self._awaited or position not in self._weights:
            raise RemoteProtocolError(f"part {index} from a contributor that may not send one now")
        if index != self._progress[position] or index >= len(self.parts):
            raise RemoteProtocolError(f"part {index} where part {self._progress[position]} of {len(self.parts)} is due")
        part = self.parts[index]
        run = self._layout.runs[part.run]
        return run.codec.encoded_bytes(len(part), run.dtype)

    def add(self, position: int, index: int, payload: memoryview) -> None:
        """Add a contributor's next part, encoded. Raises `RemoteProtocolError` for a payload that is refused; then the part
        counts as not delivered, and nothing of it is in any sum.
        """
        self.expected_payload(position, index)
        part, sums, weight = self.parts[index], self._sums[index], self._weights[position]
        run = self._layout.runs[part.run]
        if self._reject_nonfinite and not run.codec.is_finite(payload, len(part), run.dtype):
            raise RemoteProtocolError(f"part {index} holds NaN or infinite values, which nonfinite='reject' does not admit")
        if index >= self._touched:
            if run.dtype == sums.dtype:
                run.codec.decode(payload, sums)
                if weight != 1.0:
                    sums.mul_(weight)
            else:
                sums.zero_()
                run.codec.decode_add(payload, sums, run.dtype, weight)
            self._touched = index + 1
        else:
            run.codec.decode_add(payload, sums, run.dtype, weight)
        self._progress[position] = index + 1
        self._finish_parts()

    def exclude(self, position: int) -> None:
        """Wait for this contributor no longer. What it has delivered stays in the averages of those parts."""
        if position in self._awaited:
            self._awaited.discard(position)
            self._finish_parts()

    def _behind(self, position: int) -> bool:
        return self._progress[position] <= len(self.results)

    def _finish_parts(self) -> None:
        while not self.finished and not any(self._behind(position) for position in self._awaited):
            self.results.append(self._average(self.parts[len(self.results)]))

    def _average(self, part: Part) -> PartResult:
        index = len(self.results)
        weights = {p: w for p, w in self._weights.items() if w > 0 and self._progress[p] > index}
        total = sum(weights.values())
        if total == 0:
            return PartResult(part=part, contributors=0, payload=memoryview(b""))
        run, sums = self._layout.runs[part.run], self._sums[index]
        if total != 1.0:
            sums.div_(total)
        encoded = run.codec.encode(sums.to(run.dtype))
        stored = bytes_of(sums)[: encoded.nbytes]
        stored[:] = encoded
        return PartResult(part=part, contributors=sum(1 << p for p in weights), payload=stored)


def check_weight(weight: float) -> None:
    """Raise `RemoteProtocolError` unless the weight is 0 or a number from `MIN_WEIGHT` to `MAX_WEIGHT`."""
    if not (weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise RemoteProtocolError(f"weight {weight!r} is not 0 or between {MIN_WEIGHT} and {MAX_WEIGHT}")


def _carve(layout: Layout, parts: Sequence[Part], memory: torch.Tensor) -> list[torch.Tensor]:
    """A typed view of a piece of a byte tensor per part; the widest dtypes lie first, so that each piece is aligned."""
    views: dict[int, torch.Tensor] = {}
    at = 0
    for index, part in sorted(enumerate(parts), key=lambda item: -layout.runs[item[1].run].accumulator_dtype.itemsize):
        dtype = layout.runs[part.run].accumulator_dtype
        size = len(part) * dtype.itemsize
        views[index] = memory[at : at + size].view(dtype)
        at += size
    return [views[index] for index in range(len(parts))]
