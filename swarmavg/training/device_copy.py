"""Work on tensors of an accelerator from another thread than the one that uses them, in the right order.

CUDA orders work by streams, and every thread has its own current stream: what a pool thread launches may overtake what the
training thread has queued. So the caller's streams are noted, and made current wherever its tensors are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CallerStreams:
    """The streams that were current for the caller, one per CUDA device that holds one of its tensors."""

    streams: tuple[torch.cuda.Stream, ...] = ()

    @classmethod
    def of_this_thread(cls, tensors: Iterable[torch.Tensor]) -> CallerStreams:
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        return cls(tuple(torch.cuda.current_stream(device) for device in sorted(devices, key=str)))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Everything launched inside follows what the caller has queued, and precedes what it queues afterwards."""
        with ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


def to_host(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy and convert into a CPU tensor. The values are there when this returns: the copy is a blocking one."""
    out.copy_(source.detach(), non_blocking=False)


def from_host(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy and convert a CPU tensor to wherever `out` is. `source` may be overwritten when this returns."""
    out.detach().copy_(source, non_blocking=False)
