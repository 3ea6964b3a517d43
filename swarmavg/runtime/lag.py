"""Deadlines for what others send, in a process that may be held up itself: what has arrived meanwhile is read first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LAG: Final = 1.0
"""Seconds by which the event loop may be late before it blames itself, and not others, for what did not arrive in time."""


@asynccontextmanager
async def lenient_timeout(seconds: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but where the deadline is noticed more than `LAG` too late, it is put off once more.

    Raises `TimeoutError`.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        timers: list[asyncio.TimerHandle] = []

        def expire(deadline: float) -> None:
            now = loop.time()
            if now - deadline > LAG:
                timers.append(loop.call_at(now + seconds, expire, now + seconds))
            else:
                scope.reschedule(now)

        timers.append(loop.call_at(loop.time() + seconds, expire, loop.time() + seconds))
        try:
            yield
        finally:
            timers[-1].cancel()
