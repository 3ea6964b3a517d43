"""What a codec must do: turn a flat slice of floating-point values into bytes and back. No I/O, no event loop."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarmavg.compression.finite import all_finite
from swarmavg.errors import RemoteProtocolError


class TensorRole(enum.Enum):
    """What a tensor is, for codecs that choose by role."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Describes one averaged tensor."""

    key: str
    role: TensorRole
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, key: object, role: TensorRole = TensorRole.UNSPECIFIED) -> TensorInfo:
        return cls(key=str(key), role=role, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def numel(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


class Granularity(enum.Enum):
    """What a codec needs to see at once."""

    ELEMENTWISE = "elementwise"
    """Each element on its own: slices may cross tensor borders."""
    SEGMENT = "segment"
    """Blocks or statistics within a tensor: a slice is encoded tensor by tensor."""


class Compression(Protocol):
    """A codec. Stateless, thread-safe, and equal for equal parameters."""

    @property
    def name(self) -> str:
        """Wire name with format version and parameters, such as ``float16/1``. Part of the config hash."""

    @property
    def lossless(self) -> bool: ...

    @property
    def granularity(self) -> Granularity: ...

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of `numel` encoded elements of `dtype`: exact for fixed-rate codecs, else an upper bound."""

    def encode(self, values: torch.Tensor) -> memoryview:
        """Encode a flat contiguous CPU tensor of any float dtype. May return a view of its memory (no copy)."""

    def decode(self, payload: memoryview, out: torch.Tensor) -> None:
        """Decode into a flat contiguous CPU tensor, whose dtype is the one that was encoded.

        Raises `RemoteProtocolError` for any payload that `encode` cannot have made; `out` is then unspecified.
        """

    def decode_add(self, payload: memoryview, accumulator: torch.Tensor, dtype: torch.dtype, weight: float) -> None:
        """``accumulator += weight * decode(payload)``, computed in the accumulator's dtype.

        `dtype` is the dtype that was encoded. Raises like `decode`, before anything was added.
        """

    def is_finite(self, payload: memoryview, numel: int, dtype: torch.dtype) -> bool:
        """Whether all values that the payload decodes to are finite. Raises like `decode`.

        This one decodes to find out; codecs that can tell from the payload itself do so.
        """
        with torch.inference_mode(mode=False):
            values = torch.empty(numel, dtype=dtype, device="cpu")
        self.decode(payload, values)
        return all_finite(values)

    def estimate_compression_ratio(self, info: TensorInfo) -> float:
        """Encoded bytes / bytes of the tensor, in advance. 1.0 for an empty tensor."""


def check_payload(payload: memoryview, expected: int, codec: str) -> None:
    """Raise `RemoteProtocolError` unless the payload has exactly the expected number of bytes."""
    if payload.nbytes != expected:
        raise RemoteProtocolError(f"{codec}: payload of {payload.nbytes} bytes, expected {expected}")


def codec_per_tensor(compression: Compression, infos: Sequence[TensorInfo]) -> list[Compression]:
    """The codec of each tensor; adaptive codecs will choose here by `info`."""
    return [compression for _ in infos]
