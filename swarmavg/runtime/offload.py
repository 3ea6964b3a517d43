"""Computation off the event loop: a small pool of threads, or inline where the loop runs in virtual time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

INLINE_BYTES = 1 << 20
"""Handing work to a thread costs about as much as touching this much memory: below it, stay on the loop."""

_pool: ThreadPoolExecutor | None = None


def _the_pool() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603  (one process-wide pool, made on first use)
    if _pool is None:
        _pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="swarmavg-compute")
    return _pool


def _forget_pool() -> None:
    global _pool  # noqa: PLW0603
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def runs_inline() -> bool:
    """Whether the running loop is in virtual time, where threads are not allowed."""
    return bool(getattr(asyncio.get_running_loop(), "is_virtual", False))


async def offload(work: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
    """Run ``work(*args)`` without blocking the event loop and return its result.

    The work is never left half-observed: when the caller is cancelled, the cancellation waits until the work has ended, since
    it may be writing into memory that the caller owns.
    """
    if runs_inline():
        return work(*args)
    future = asyncio.get_running_loop().run_in_executor(_the_pool(), work, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:  # a second cancellation changes nothing: the memory is still in use
                continue
        if not future.cancelled():
            future.exception()
        raise
