"""Runs a simulation and collects what may not happen in one, whatever its faults: leaks, hangs, errors in the logs."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

from swarmavg.testing.clock import VirtualDeadlockError, run_virtual

_ENDLESS: Final = 3600.0
"""Virtual seconds after which a run is taken for one that never ends."""


def judged_run(main: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """Run it in virtual time. Returns complaints: leaked tasks, deadlocks, errors that the event loop or the logs report."""
    complaints: list[str] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(_told(context)))
        with _errors_logged(complaints):
            async with asyncio.timeout(_ENDLESS):
                await main()

    try:
        run_virtual(watched)
    except TimeoutError:
        complaints.append(f"still running after {_ENDLESS:g} virtual seconds")
    except (AssertionError, VirtualDeadlockError) as error:  # leaked tasks
        complaints.append(f"{type(error).__name__}: {error}")
    gc.collect(0)  # errors that nobody has retrieved are reported now
    return complaints


def _told(context: dict[str, Any]) -> str:
    return f"the event loop reports: {context.get('message')} {context.get('exception')!r}"


@contextmanager
def _errors_logged(complaints: list[str]) -> Iterator[None]:
    """Add to the complaints what is logged as an error."""
    handler = _Listener(complaints)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, complaints: list[str]) -> None:
        super().__init__(level=logging.ERROR)
        self._complaints = complaints

    def emit(self, record: logging.LogRecord) -> None:
        self._complaints.append(f"logged as an error by {record.name}: {record.getMessage()}")
