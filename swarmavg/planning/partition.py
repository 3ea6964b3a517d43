"""How the averaged tensors form one flat vector, and how that vector is cut into ranges and parts.

Pure functions of what all members agree on: every member computes the same plan, and the plan's hash proves it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from swarmavg.compression.interface import Compression, Granularity, TensorInfo
from swarmavg.planning.balance import balance

SMALL_PART_BYTES = 256 * 1024
LARGE_PART_BYTES = 1024 * 1024
LARGE_VECTOR_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements `start` to `stop` - 1 of the concatenation of the flattened tensors, in the order they were given."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tensors that share codec and dtype, one behind another: elements `start` to `stop` - 1 of the layout."""

    start: int
    stop: int
    dtype: torch.dtype
    codec: Compression
    tensors: tuple[int, ...]
    """Indices of its tensors, in order."""
    offsets: tuple[int, ...]
    """Where each of them starts in the layout."""

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The unit of transfer: elements `start` to `stop` - 1 of the layout, within one run and one reducer's range."""

    index: int
    """Number within its reducer's range, from 0."""
    run: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Piece(NamedTuple):
    """Elements `first` to `last` - 1 of one flattened tensor, which start at element `at` of the layout."""

    tensor: int
    first: int
    last: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The flat vector. Tensors of equal codec and dtype are laid side by side, so that many small ones share a part."""

    infos: tuple[TensorInfo, ...]
    runs: tuple[Run, ...]
    total: int
    given_offsets: tuple[int, ...]
    """Where each tensor starts in the concatenation in the order given."""

    @classmethod
    def of(cls, infos: Sequence[TensorInfo], codecs: Sequence[Compression]) -> Layout:
        """Raises `ValueError` for a codec that cannot work on slices across tensor borders (none of today's)."""
        grouped: dict[tuple[str, torch.dtype], list[int]] = {}
        for index, (info, codec) in enumerate(zip(infos, codecs, strict=True)):
            if codec.granularity is not Granularity.ELEMENTWISE:
                raise ValueError(f"compression={codec.name!r} works tensor by tensor, which rounds do not support yet")
            grouped.setdefault((codec.name, info.dtype), []).append(index)
        runs: list[Run] = []
        position = 0
        for (_, dtype), indices in grouped.items():
            start, offsets = position, []
            for index in indices:
                offsets.append(position)
                position += infos[index].numel
            codec = codecs[indices[0]]
            runs.append(
                Run(start=start, stop=position, dtype=dtype, codec=codec, tensors=tuple(indices), offsets=tuple(offsets))
            )
        given, total = [], 0
        for info in infos:
            given.append(total)
            total += info.numel
        return cls(infos=tuple(infos), runs=tuple(runs), total=total, given_offsets=tuple(given))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum((run.stop - run.start) * run.dtype.itemsize for run in self.runs)

    def pieces(self, run_index: int, start: int, stop: int) -> Iterable[Piece]:
        """Cut elements [start, stop) of a run at tensor borders."""
        run = self.runs[run_index]
        at = max(bisect.bisect_right(run.offsets, start) - 1, 0)
        while at < len(run.offsets) and run.offsets[at] < stop:
            index, offset = run.tensors[at], run.offsets[at]
            first, last = max(start, offset) - offset, min(stop, offset + self.infos[index].numel) - offset
            if first < last:
                yield Piece(index, first, last, offset + first)
            at += 1

    def spans(self, parts: Iterable[Part]) -> list[Span]:
        """The given parts in the user's numbering, sorted, neighbours merged."""
        pieces = sorted(
            (self.given_offsets[piece.tensor] + piece.first, self.given_offsets[piece.tensor] + piece.last)
            for part in parts
            for piece in self.pieces(part.run, part.start, part.stop)
        )
        merged: list[Span] = []
        for first, last in pieces:
            if merged and merged[-1].stop == first:
                merged[-1] = Span(merged[-1].start, last)
            else:
                merged.append(Span(first, last))
        return merged


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who reduces what in one round. Positions are those of the group's members."""

    shares: tuple[int, ...]
    """Elements that each member reduces; they sum to the layout's total."""
    parts: tuple[tuple[Part, ...], ...] = field(repr=False)
    """The parts of each member's range, in order."""
    contributes: tuple[bool, ...]
    hash: bytes

    @property
    def reducers(self) -> tuple[int, ...]:
        """Positions of the members that reduce anything."""
        return tuple(position for position, parts in enumerate(self.parts) if parts)

    @functools.cached_property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts of all ranges, one range after another: a part's place here is its number."""
        return tuple(part for parts in self.parts for part in parts)

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The reducer of each of `all_parts`."""
        return tuple(position for position, parts in enumerate(self.parts) for _ in parts)

    def numbers(self, reducer: int) -> range:
        """The numbers of a reducer's parts."""
        first = sum(len(parts) for parts in self.parts[:reducer])
        return range(first, first + len(self.parts[reducer]))

    @property
    def contributors(self) -> tuple[int, ...]:
        return tuple(position for position, does in enumerate(self.contributes) if does)


def default_part_size(layout: Layout) -> int:
    """Upper bound of a part in bytes: 1 MiB for large vectors, 256 KiB for small ones.

    Measured on loopback: from 64 MB on, parts of 1 to 2 MiB are fastest and 256 KiB costs a fifth more; below, smaller parts
    let the two directions overlap earlier.
    """
    return LARGE_PART_BYTES if layout.nbytes >= LARGE_VECTOR_BYTES else SMALL_PART_BYTES


def make_plan(
    layout: Layout,
    *,
    contributes: Sequence[bool],
    reduces: Sequence[bool],
    bandwidths: Sequence[float | None],
    part_size_bytes: int,
    min_vector_size: int = 0,
) -> Plan:
    """The plan of a group whose members are described by the three sequences, in the group's order.

    Raises `ValueError` when somebody contributes but nobody can reduce.
    """
    if layout.total == 0 or not any(contributes):
        shares: tuple[int, ...] = (0,) * len(contributes)
    else:
        shares = balance(bandwidths, contributes, reduces, layout.total, min_vector_size)
    parts: list[tuple[Part, ...]] = []
    position = 0
    for share in shares:
        parts.append(_cut(layout, position, position + share, part_size_bytes))
        position += share
    return Plan(
        shares=shares,
        parts=tuple(parts),
        contributes=tuple(contributes),
        hash=_digest(layout, shares, contributes, part_size_bytes),
    )


def _cut(layout: Layout, start: int, stop: int, part_size_bytes: int) -> tuple[Part, ...]:
    parts: list[Part] = []
    for run_index, run in enumerate(layout.runs):
        first, last = max(start, run.start), min(stop, run.stop)
        step = elements_per_part(run, part_size_bytes)
        for at in range(first, last, step):
            parts.append(Part(index=len(parts), run=run_index, start=at, stop=min(at + step, last)))
    return tuple(parts)


def elements_per_part(run: Run, part_size_bytes: int) -> int:
    """The most elements whose encoding fits, in steps that keep slices aligned to 64 bytes; at least one."""
    per_element = max(run.codec.encoded_bytes(1024, run.dtype) / 1024, 1e-9)
    count = max(int(part_size_bytes / per_element), 1)
    while count > 1 and run.codec.encoded_bytes(count, run.dtype) > part_size_bytes:
        count -= max(1, count // 64)
    return count - count % 64 if count >= 64 else count


def _digest(layout: Layout, shares: Sequence[int], contributes: Sequence[bool], part_size_bytes: int) -> bytes:
    description = [f"plan/1 {part_size_bytes} {list(shares)} {[int(does) for does in contributes]}"]
    description += [f"{run.start} {run.stop} {run.dtype} {run.codec.name}" for run in layout.runs]
    return hashlib.sha256("\n".join(description).encode()).digest()
