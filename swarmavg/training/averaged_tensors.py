"""What is averaged of a training state: each tensor where it lives, and the buffer in which the swarm averages it.

Copies between the two are made here and nowhere else. Nothing here knows about rounds, epochs or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from swarmavg.compression.interface import TensorInfo, TensorRole
from swarmavg.planning.partition import Span
from swarmavg.tensor_checks import check_memory
from swarmavg.training.device_copy import from_host, to_host
from swarmavg.training.optimizer_setup import OptimizedParameters


@dataclass(frozen=True, slots=True, eq=False)
class AveragedTensor:
    """One tensor of the training state: its name, and how to find it (optimizers may replace their statistics)."""

    name: str
    role: TensorRole
    find: Callable[[], torch.Tensor]
    is_statistic: bool = False

    @property
    def label(self) -> str:
        """For messages: a name alone may be just a number."""
        return f"parameter {self.name!r}" if self.role is TensorRole.PARAMETER else self.name


def list_averaged(
    optimized: OptimizedParameters, statistics: Sequence[tuple[int, str]], extras: Mapping[str, torch.Tensor]
) -> list[AveragedTensor]:
    """Parameters, then statistics, then extra tensors: the order that all peers of a run share."""
    listed = [
        AveragedTensor(name, TensorRole.PARAMETER, partial(_itself, parameter))
        for name, parameter in zip(optimized.names, optimized.parameters, strict=True)
    ]
    for index, statistic in statistics:
        name = f"{optimized.names[index]}.{statistic}"
        find = partial(_statistic, optimized, optimized.parameters[index], statistic, name)
        listed.append(AveragedTensor(name, TensorRole.OPTIMIZER, find, is_statistic=True))
    listed += [AveragedTensor(name, TensorRole.UNSPECIFIED, partial(_itself, extra)) for name, extra in extras.items()]
    return listed


@dataclass(frozen=True, slots=True)
class _Form:
    """What must not change about a tensor while it is averaged."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)} on {self.device}"


class AveragingBuffers:
    """The tensors that the averager averages: CPU copies in float32 (float64 of float64 tensors), or the tensors themselves.

    With `reuse` the live tensors are handed to the averager, which must be CPU tensors of float32 or float64, and copying does
    nothing. With `delta` the values at `load` are kept, and `apply` adds what the round changed.
    """

    def __init__(self, averaged: Sequence[AveragedTensor], *, reuse: bool = False, delta: bool = False) -> None:
        self._averaged = tuple(averaged)
        self._reuse = reuse
        live = [tensor.find() for tensor in self._averaged]
        self._forms = [_Form.of(tensor) for tensor in live]
        check_memory([(tensor.label, alive) for tensor, alive in zip(self._averaged, live, strict=True)])
        if reuse:
            _check_reusable(self._averaged, live)
        self.tensors = live if reuse else [_buffer_for(tensor) for tensor in live]
        self._loaded = [torch.empty_like(buffer) for buffer in self.tensors] if delta else None
        self.load()

    @property
    def infos(self) -> list[TensorInfo]:
        """The description of each buffer."""
        return [
            TensorInfo.of(buffer, tensor.name, tensor.role) for tensor, buffer in zip(self._averaged, self.tensors, strict=True)
        ]

    def find_all(self) -> list[torch.Tensor]:
        """The live tensors. Raises `ValueError` for one that is not what it was when the averager was made."""
        live = [tensor.find() for tensor in self._averaged]
        for averaged, form, tensor in zip(self._averaged, self._forms, live, strict=True):
            if _Form.of(tensor) != form:
                raise ValueError(f"{averaged.label} has changed since the averager was made: from {form} to {_Form.of(tensor)}")
        if self._reuse:
            for averaged, buffer, tensor in zip(self._averaged, self.tensors, live, strict=True):
                if buffer is not tensor:
                    raise ValueError(f"{averaged.label} was replaced by another tensor, which reuse_tensors=True forbids")
        return live

    @torch.no_grad()
    def load(self) -> None:
        """Copy the live tensors into the buffers."""
        live = self.find_all()
        if not self._reuse:
            for tensor, buffer in zip(live, self.tensors, strict=True):
                to_host(tensor, buffer)
        if self._loaded is not None:
            for buffer, loaded in zip(self.tensors, self._loaded, strict=True):
                loaded.copy_(buffer)

    @torch.no_grad()
    def apply(self, spans: Sequence[Span]) -> None:
        """Write the averaged elements back; `spans` says which were averaged, others keep what they have now."""
        live = self.find_all()
        if self._reuse:
            return
        start = 0
        for index, tensor in enumerate(live):
            self._apply_one(index, tensor, _ranges_within(spans, start, start + tensor.numel()))
            start += tensor.numel()

    def _apply_one(self, index: int, tensor: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        buffer = self.tensors[index]
        whole = list(ranges) == [(0, buffer.numel())]
        if not ranges:
            return
        if whole and self._loaded is None:
            from_host(buffer, tensor)
            return
        now = torch.empty_like(buffer)
        to_host(tensor, now)
        new = buffer
        if self._loaded is not None:
            new = add_change(now, self._loaded[index], buffer, stay_positive=self._averaged[index].is_statistic)
        for first, last in ranges:
            now.view(-1)[first:last] = new.view(-1)[first:last]
        from_host(now, tensor)


def add_change(now: torch.Tensor, before: torch.Tensor, average: torch.Tensor, *, stay_positive: bool) -> torch.Tensor:
    """``now + (average - before)``, and exactly `average` where `now` equals `before`. All of one shape and dtype.

    With `stay_positive`, a tensor that was nowhere negative does not become so (a second moment, of which a root is taken).
    """
    changed = torch.where(now == before, average, now + (average - before))
    if stay_positive and bool((now >= 0).all()) and bool((before >= 0).all()):
        changed = changed.clamp_(min=0)
    return changed


def _ranges_within(spans: Sequence[Span], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of the spans that lie in a tensor at [start, stop), relative to its start, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for span in sorted(spans):
        first, last = max(span.start, start) - start, min(span.stop, stop) - start
        if first >= last:
            continue
        if ranges and ranges[-1][1] >= first:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return ranges


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def _check_reusable(averaged: Sequence[AveragedTensor], live: Sequence[torch.Tensor]) -> None:
    for item, tensor in zip(averaged, live, strict=True):
        if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"reuse_tensors=True needs CPU tensors of float32 or float64, {item.label} is {tensor.dtype} on {tensor.device}"
            )


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _statistic(optimized: OptimizedParameters, parameter: torch.Tensor, statistic: str, name: str) -> torch.Tensor:
    value = optimized.optimizer.state.get(parameter, {}).get(statistic)
    if not isinstance(value, torch.Tensor):
        raise ValueError(  # noqa: TRY004  (not an argument of a wrong type: the state has changed)
            f"{name} is gone: the optimizer no longer keeps {statistic!r} for this parameter"
        )
    return value
