"""Settings of an averager: one frozen value, checked once, with the argument's name and value in every error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Nonfinite: TypeAlias = Literal["reject", "allow"]
"""What becomes of NaN and infinities among the values to be averaged."""

SENDER_TIMEOUT = 15.0
"""Seconds: the longest `sender_timeout` that follows from a given `reducer_timeout`, of which it is otherwise half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AveragerConfig:
    """The plain arguments of `Averager`, in seconds and bytes; see there for their meaning."""

    prefix: str
    target_group_size: int | None = None
    min_group_size: int = 2
    initial_group_bits: str = ""
    min_matchmaking_time: float = 5.0
    request_timeout: float = 3.0
    averaging_alpha: float = 1.0
    part_size_bytes: int | None = None
    allreduce_timeout: float | None = None
    next_chunk_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None
    bandwidth: float | None = None
    min_vector_size: int = 0
    nonfinite: Nonfinite = "reject"
    client_mode: bool = False
    auxiliary: bool = False
    shutdown_timeout: float = 5.0

    def __post_init__(self) -> None:
        self._check_prefix()
        check_group_bits("initial_group_bits", self.initial_group_bits)
        check_count("target_group_size", self.target_group_size, least=2, optional=True)
        check_count("min_group_size", self.min_group_size, least=2)
        check_count("part_size_bytes", self.part_size_bytes, least=64, optional=True)
        check_count("min_vector_size", self.min_vector_size, least=0)
        for name in ("min_matchmaking_time", "request_timeout", "shutdown_timeout"):
            check_seconds(name, getattr(self, name))
        for name in ("allreduce_timeout", "next_chunk_timeout", "sender_timeout", "reducer_timeout"):
            check_seconds(name, getattr(self, name), optional=True)
        check_number("averaging_alpha", self.averaging_alpha)
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, least=0.0)
        check_choice("nonfinite", self.nonfinite, get_args(Nonfinite))
        for name in ("client_mode", "auxiliary"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        self._check_together()

    def _check_prefix(self) -> None:
        if not isinstance(self.prefix, str):
            raise TypeError(f"prefix must be a string, got {self.prefix!r}")
        if not self.prefix or "." in self.prefix or len(self.prefix.encode()) > 128 or not self.prefix.isprintable():
            raise ValueError(f"prefix must be 1 to 128 printable bytes without '.', got {self.prefix!r}")

    def _check_together(self) -> None:
        if self.client_mode and self.auxiliary:
            raise ValueError("auxiliary=True excludes client_mode=True: an auxiliary peer must be reachable to reduce")
        if self.target_group_size is not None and self.min_group_size > self.target_group_size:
            raise ValueError(f"min_group_size={self.min_group_size} exceeds target_group_size={self.target_group_size}")
        sender, reducer = self.sender_patience, self.reducer_patience
        if sender is not None and reducer is not None and sender >= reducer:
            raise ValueError(
                f"reducer_timeout={reducer:g} must exceed sender_timeout={sender:g}: reducers wait "
                "for slow senders, and would be dropped by the others while they do"
            )
        if self.request_timeout >= self.min_matchmaking_time:
            warnings.warn(
                f"request_timeout={self.request_timeout:g} is not below min_matchmaking_time={self.min_matchmaking_time:g}: "
                "one would-be leader that does not answer can use up the whole window",
                stacklevel=5,
            )
        size = self.target_group_size
        if self.initial_group_bits and size is not None and size & (size - 1):
            warnings.warn(
                f"target_group_size={size} is not a power of two: group bits then mix peers less evenly", stacklevel=5
            )

    @property
    def rejects_nonfinite(self) -> bool:
        """Whether NaN and infinities are kept out of averages."""
        return self.nonfinite == "reject"

    @property
    def sender_patience(self) -> float | None:
        """Seconds after which a silent contributor is suspected; `None` = by measured progress."""
        given = self.sender_timeout if self.sender_timeout is not None else self.next_chunk_timeout
        if given is not None:
            return given
        return None if self.reducer_timeout is None else min(SENDER_TIMEOUT, self.reducer_timeout / 2)

    @property
    def reducer_patience(self) -> float | None:
        """Seconds after which a silent reducer is suspected; `None` = by measured progress."""
        if self.reducer_timeout is not None:
            return self.reducer_timeout
        return None if self.sender_patience is None else 2 * self.sender_patience


def check_number(name: str, value: object, *, least: float = -math.inf) -> float:
    """A finite int or float, at least `least`. Raises `TypeError` or `ValueError` with name and value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not _is_finite(value) or value < least:
        bound = f" and at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name} must be finite{bound}, got {value!r}")
    return float(value)


def _is_finite(value: float) -> bool:
    """Also whether an int fits into a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of a few strings."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def check_seconds(name: str, value: object, *, optional: bool = False, infinite: bool = False) -> None:
    """A positive number of seconds."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not value > 0 or not (_is_finite(value) or (infinite and value == math.inf)):
        raise ValueError(f"{name} must be a positive{'' if infinite else ', finite'} number of seconds, got {value!r}")


def check_count(name: str, value: object, *, least: int, optional: bool = False) -> None:
    """An int, at least `least`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")


def check_group_bits(name: str, value: object) -> str:
    """A string of at most 64 characters "0" and "1"."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string of '0' and '1', got {value!r}")
    if value.strip("01") or len(value) > 64:
        raise ValueError(f"{name} must be at most 64 characters '0' and '1', got {value!r}")
    return value
