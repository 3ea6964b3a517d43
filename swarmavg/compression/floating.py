"""Codecs that send each element as a shorter float."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmavg.compression.buffers import bytes_of, check_dtype, tensor_of
from swarmavg.compression.finite import all_finite
from swarmavg.compression.interface import Compression, Granularity, TensorInfo, check_payload
from swarmavg.errors import RemoteProtocolError

FLOAT16_MAX = 65504.0
BFLOAT16_MAX_IN_FLOAT16 = 65280.0
"""The largest bfloat16 that float16 holds exactly; 65504 would be rounded up to 65536 on its way back."""


@dataclass(frozen=True, slots=True)
class Float16Compression(Compression):
    """IEEE half precision: two bytes per element, whatever the dtype.

    Error of one round trip, for |x| <= 65504: at most 2^-11 * |x| where |x| >= 2^-14 (float16's normal numbers), at most
    2^-25 below. float64 is rounded to float32 on the way, which adds at most a 2^-13th of that bound. Signs survive, those of
    zeros too.

    Larger values and infinities become the largest finite value of their sign: 65504, or 65280 for bfloat16 tensors, the
    largest number that both formats hold. NaN stays NaN; its payload bits may change. Decoded values encode to the same bytes
    again. A bfloat16 of at most 65280 whose magnitude is 0 or at least 2^-17 travels exactly.

    A float16 tensor travels bit for bit, infinities included, and `encode` then returns a view of its memory. An infinity
    that claims to stem from any other dtype is a `RemoteProtocolError`.
    """

    @property
    def name(self) -> str:
        return "float16/1"

    @property
    def lossless(self) -> bool:
        return False

    @property
    def granularity(self) -> Granularity:
        return Granularity.ELEMENTWISE

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_dtype(dtype)
        return numel * torch.float16.itemsize

    def encode(self, values: torch.Tensor) -> memoryview:
        check_dtype(values.dtype)
        if values.dtype is torch.float16:
            return bytes_of(values)
        limit = BFLOAT16_MAX_IN_FLOAT16 if values.dtype is torch.bfloat16 else FLOAT16_MAX
        # Clamped after the conversion, where it touches half the memory: what is too large is an infinity by then.
        return bytes_of(values.detach().to(torch.float16).clamp_(-limit, limit))

    def decode(self, payload: memoryview, out: torch.Tensor) -> None:
        out.copy_(self._halves(payload, out.numel(), out.dtype))

    def decode_add(self, payload: memoryview, accumulator: torch.Tensor, dtype: torch.dtype, weight: float) -> None:
        halves = self._halves(payload, accumulator.numel(), dtype)
        accumulator.add_(halves.to(accumulator.dtype), alpha=weight)

    def is_finite(self, payload: memoryview, numel: int, dtype: torch.dtype) -> bool:
        return all_finite(self._halves(payload, numel, dtype))  # every finite half is finite in the other dtypes too

    def estimate_compression_ratio(self, info: TensorInfo) -> float:
        check_dtype(info.dtype)
        return torch.float16.itemsize / info.dtype.itemsize if info.numel else 1.0

    def _halves(self, payload: memoryview, numel: int, dtype: torch.dtype) -> torch.Tensor:
        check_payload(payload, self.encoded_bytes(numel, dtype), self.name)
        halves = tensor_of(payload, torch.float16)
        if dtype is not torch.float16 and _has_infinity(halves):
            raise RemoteProtocolError(f"{self.name}: an infinity in the payload of a {dtype} tensor")
        return halves


def _has_infinity(values: torch.Tensor) -> bool:
    return not all_finite(values) and bool(values.isinf().any())  # the search that tells it from a NaN is slow
