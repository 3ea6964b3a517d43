"""A copy of the averaged tensors in the order of the layout: what is sent, and where results land until the commit.

Computation only. The live tensors are read once (`take`) and written once (`commit`), both by the caller's rules of locking.
Results stay readable after the commit: they are passed on to members that lack them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmavg.compression.finite import all_finite, nonfinite_count_and_first
from swarmavg.planning.partition import Layout, Part, Run
from swarmavg.reduction.memory import plain_memory

BLEND_ELEMENTS = 1 << 16
"""Averages are blended in pieces of so many elements, whose temporary copies stay in the cache."""


class Snapshot:
    """One flat tensor per run of the layout. Allocated by the first `take` and reused between rounds."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._flat: list[torch.Tensor] = []

    def values(self, part: Part) -> torch.Tensor:
        """The slice of a part: flat, contiguous, of the run's dtype; writable."""
        run = self._layout.runs[part.run]
        return self._flat[part.run][part.start - run.start : part.stop - run.start]

    def take(self, tensors: Sequence[torch.Tensor], reject_nonfinite: bool = False) -> None:
        """Copy the tensors in.

        Raises `ValueError` if one has changed its shape or dtype, and with `reject_nonfinite` if one holds NaN or infinities.
        """
        self._check(tensors)
        if not self._flat:
            self._flat = [plain_memory(run.stop - run.start, run.dtype) for run in self._layout.runs]
        for run, flat in zip(self._layout.runs, self._flat, strict=True):
            for index, offset in zip(run.tensors, run.offsets, strict=True):
                source = tensors[index].detach()
                start = offset - run.start
                flat[start : start + source.numel()].view(source.shape).copy_(source)
            if reject_nonfinite and not all_finite(flat):
                raise ValueError(self._nonfinite(run, flat))

    def commit(self, tensors: Sequence[torch.Tensor], parts: Sequence[Part], alpha: float) -> None:
        """Write the given parts into the tensors: ``local += alpha * (average - local)``, exactly the average at alpha 1.

        All parts must hold results. Elements outside them are left alone, and so are the snapshot's values.
        """
        self._check(tensors)
        for run_index, run in enumerate(self._layout.runs):
            for start, stop in _joined([part for part in parts if part.run == run_index]):
                for piece in self._layout.pieces(run_index, start, stop):
                    at = piece.at - run.start
                    average = self._flat[run_index][at : at + piece.last - piece.first]
                    _write(tensors[piece.tensor].detach(), piece.first, piece.last, average, alpha)

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `ValueError`, before anything is copied, if a tensor has changed its shape or dtype since it was listed."""
        for index, (tensor, info) in enumerate(zip(tensors, self._layout.infos, strict=True)):
            if tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
                raise ValueError(
                    f"tensors[{index}] is now {tuple(tensor.shape)} {tensor.dtype}, but was listed as {info.shape} {info.dtype}"
                )

    def _nonfinite(self, run: Run, flat: torch.Tensor) -> str:
        """Name the first tensor of a run whose values are not all finite."""
        for index, offset in zip(run.tensors, run.offsets, strict=True):
            info = self._layout.infos[index]
            values = flat[offset - run.start : offset - run.start + info.numel]
            if not all_finite(values):
                count, first, value = nonfinite_count_and_first(values)
                return (
                    f"tensors[{index}] (key {info.key!r}) holds {count} of {info.numel} values that are NaN or infinite, "
                    f"the first is {value} at element {first}: nonfinite='reject' does not send them"
                )
        raise AssertionError("all values are finite")


def _joined(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Ranges of elements of the layout that the parts cover, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for part in sorted(parts, key=lambda part: part.start):
        if ranges and ranges[-1][1] == part.start:
            ranges[-1] = (ranges[-1][0], part.stop)
        else:
            ranges.append((part.start, part.stop))
    return ranges


def _write(tensor: torch.Tensor, first: int, last: int, average: torch.Tensor, alpha: float) -> None:
    """Write a flat average over elements [first, last) of the flattened tensor, contiguous or not."""
    if last - first == tensor.numel():
        _blend(tensor, average.view(tensor.shape), alpha)
    elif tensor.is_contiguous():
        _blend(tensor.view(-1)[first:last], average, alpha)
    else:
        flat = tensor.reshape(-1)  # a copy
        _blend(flat[first:last], average, alpha)
        tensor.copy_(flat.view(tensor.shape))


def _blend(local: torch.Tensor, average: torch.Tensor, alpha: float) -> None:
    """``local += alpha * (average - local)``, in pieces: `average` stays as it is, and no second full copy is made."""
    count = local.numel()
    if alpha == 1.0:
        local.copy_(average)
    elif count <= BLEND_ELEMENTS:
        _blend_piece(local, average, alpha)
    elif local.shape[0] == 1:
        _blend(local[0], average[0], alpha)
    else:
        rows = max(BLEND_ELEMENTS * local.shape[0] // count, 1)
        for row in range(0, local.shape[0], rows):
            _blend(local[row : row + rows], average[row : row + rows], alpha)


def _blend_piece(local: torch.Tensor, average: torch.Tensor, alpha: float) -> None:
    if local.dtype in (torch.float32, torch.float64):
        local.add_(average.sub(local), alpha=alpha)
    else:
        wide = local.float()
        local.copy_(wide.add_(average.float().sub_(wide), alpha=alpha))
