"""The codec that sends the memory as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmavg.compression.buffers import bytes_of, check_dtype, tensor_of
from swarmavg.compression.finite import all_finite
from swarmavg.compression.interface import Compression, Granularity, TensorInfo, check_payload


@dataclass(frozen=True, slots=True)
class NoCompression(Compression):
    """Lossless: each element in its own dtype, bit for bit, infinities and every NaN included.

    `encode` returns a view of the tensor's memory: it changes with the tensor.
    """

    @property
    def name(self) -> str:
        return "none/1"

    @property
    def lossless(self) -> bool:
        return True

    @property
    def granularity(self) -> Granularity:
        return Granularity.ELEMENTWISE

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(dtype)
        return numel * dtype.itemsize

    def encode(self, values: torch.Tensor) -> memoryview:
        return bytes_of(values)

    def decode(self, payload: memoryview, out: torch.Tensor) -> None:
        check_payload(payload, self.encoded_bytes(out.numel(), out.dtype), self.name)
        out.copy_(tensor_of(payload, out.dtype))

    def decode_add(self, payload: memoryview, accumulator: torch.Tensor, dtype: torch.dtype, weight: float) -> None:
        check_payload(payload, self.encoded_bytes(accumulator.numel(), dtype), self.name)
        accumulator.add_(tensor_of(payload, dtype).to(accumulator.dtype), alpha=weight)

    def is_finite(self, payload: memoryview, numel: int, dtype: torch.dtype) -> bool:
        check_payload(payload, self.encoded_bytes(numel, dtype), self.name)
        return all_finite(tensor_of(payload, dtype))

    def estimate_compression_ratio(self, info: TensorInfo) -> float:
        check_dtype(info.dtype)
        return 1.0
