"""How long single callbacks block the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Blocking:
    """The longest callback so far, in seconds."""

    cpu: float = 0.0
    """Of processor time in the loop's thread: what the code itself costs."""
    wall: float = 0.0
    """Of real time, which on a busy machine includes waiting for a core and for the interpreter lock."""


@contextmanager
def watch_callbacks() -> Iterator[Blocking]:
    """Time every callback that asyncio runs inside the block (asyncio's own loop; uvloop does not pass here)."""
    blocking = Blocking()
    original = asyncio.Handle._run  # noqa: SLF001  (no public hook times single callbacks without debug mode)

    def timed(handle: asyncio.Handle) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        original(handle)
        blocking.cpu = max(blocking.cpu, time.thread_time() - cpu)
        blocking.wall = max(blocking.wall, time.perf_counter() - wall)

    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]  # noqa: SLF001
    try:
        yield blocking
    finally:
        asyncio.Handle._run = original  # type: ignore[method-assign]  # noqa: SLF001
