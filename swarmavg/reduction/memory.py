"""Memory of our own, whatever the application has made torch's default: device, inference mode."""

from __future__ import annotations

import torch


def plain_memory(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised flat CPU tensor of `count` elements, which may be written in and out of `torch.inference_mode`."""
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=dtype, device="cpu")
