"""Checks of what callers hand to a directory: topics, values and times to live. Shared by every back end."""

from __future__ import annotations

import math
from typing import Final

from swarmavg.discovery.interface import MAX_TOPIC_BYTES, MAX_VALUE_BYTES

MAX_TTL_SECONDS: Final = 86_400.0
"""Whoever wants a record to live longer publishes it again: a directory must be able to forget the dead."""


def check_topic(topic: str) -> str:
    """The topic itself. Raises `TypeError` or `ValueError`, naming it, for one that no directory accepts."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a string, got {topic!r}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise ValueError(f"topic must be valid Unicode, got {topic!r}") from None
    if not 0 < size <= MAX_TOPIC_BYTES:
        raise ValueError(f"topic must take 1 to {MAX_TOPIC_BYTES} bytes in UTF-8, got {size}: {topic!r:.80}")
    return topic


def check_value(value: bytes) -> bytes:
    """The value itself. Raises `TypeError` or `ValueError`, naming its size, for one that no directory accepts."""
    if not isinstance(value, bytes):
        raise TypeError(f"value must be bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"value must take at most {MAX_VALUE_BYTES} bytes, got {len(value)}")
    return value


def check_ttl(ttl: float) -> float:
    """The time to live as a float. Raises `TypeError` or `ValueError`, naming it, for one that no directory accepts."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float):
        raise TypeError(f"ttl must be a number of seconds, got {ttl!r}")
    if not math.isfinite(ttl) or not 0 < ttl <= MAX_TTL_SECONDS:
        raise ValueError(f"ttl must be more than 0 and at most {MAX_TTL_SECONDS:g} seconds, got {ttl!r}")
    return float(ttl)
