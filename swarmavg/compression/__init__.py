"""Codecs: how tensor slices travel."""

from swarmavg.compression.floating import Float16Compression
from swarmavg.compression.interface import Compression, Granularity, TensorInfo, TensorRole
from swarmavg.compression.none import NoCompression

__all__ = ["Compression", "Float16Compression", "Granularity", "NoCompression", "TensorInfo", "TensorRole"]
