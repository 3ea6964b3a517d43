"""Tensors as bytes and bytes as tensors, without a copy wherever memory allows it. Little-endian on the wire."""

from __future__ import annotations

import sys

import torch

if sys.byteorder != "little":
    raise ImportError("swarmavg sends tensors as little-endian memory and cannot run on a big-endian machine")

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `ValueError` unless codecs can work on it."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype={dtype} is none of {', '.join(map(str, FLOAT_DTYPES))}")


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor, as unsigned bytes; it keeps the tensor alive.

    Raises `ValueError` for any other tensor.
    """
    if values.dim() != 1 or not values.is_contiguous() or values.device.type != "cpu":
        raise ValueError(
            f"values must be a flat contiguous CPU tensor, not of shape={tuple(values.shape)}, "
            f"stride={values.stride()}, device={values.device}"
        )
    check_dtype(values.dtype)
    return values.detach().view(torch.uint8).numpy().data


def tensor_of(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the payload's memory, for reading.

    It is a copy when the memory is read-only (torch refuses to share it) or not aligned to the elements.
    """
    if not payload.nbytes:
        return torch.empty(0, dtype=dtype)
    octets = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
    if octets.data_ptr() % dtype.itemsize:
        octets = octets.clone()
    return octets.view(dtype)
