"""What the averagers of one prefix must agree on before they can meet: the tensors, the codecs and everything in a plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from swarmavg.compression.interface import TensorInfo
from swarmavg.config import Nonfinite
from swarmavg.planning.partition import Layout
from swarmavg.protocol.matchmaking_presence import MatchConfig


def match_config(
    layout: Layout, *, part_size_bytes: int, min_vector_size: int, target_group_size: int | None, nonfinite: Nonfinite
) -> MatchConfig:
    """The fields of the config hash, in the order in which a difference is reported, worded for people."""
    infos = layout.infos
    return MatchConfig(
        fields=(
            ("tensors", str(len(infos))),
            ("shapes", _summary(_shape(info) for info in infos)),
            ("dtypes", _summary(_dtype(info) for info in infos)),
            ("compression", _summary(_codec_of_each(layout))),
            ("part_size_bytes", str(part_size_bytes)),
            ("min_vector_size", str(min_vector_size)),
            ("mode", "average"),
            ("aggregator", "weighted mean"),
            ("target_group_size", str(target_group_size)),
            ("nonfinite", nonfinite),
        )
    )


def schema_hash(infos: Sequence[TensorInfo]) -> str:
    """Hash of shapes and dtypes."""
    return _digest(f"{_shape(info)} {_dtype(info)}" for info in infos)


def _shape(info: TensorInfo) -> str:
    return "x".join(map(str, info.shape)) or "scalar"


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _codec_of_each(layout: Layout) -> list[str]:
    names = [""] * len(layout.infos)
    for run in layout.runs:
        for index in run.tensors:
            names[index] = run.codec.name
    return names


def _summary(texts: Iterable[str]) -> str:
    """The first few in words, and a digest of all of them where that does not say everything."""
    listed = list(texts)
    if len(set(listed)) == 1:
        return listed[0] if len(listed) == 1 else f"{listed[0]} for all {len(listed)}"
    shown = ", ".join(listed[:4])
    return shown if len(listed) <= 4 else f"{shown}, ... (digest {_digest(listed)[:12]})"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
