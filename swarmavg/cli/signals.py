"""What a command does when it is told to stop."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside the block SIGTERM does what Ctrl-C does, so that everything is cleaned up; then the exit status is 143.

    For the main thread only, as are all signal handlers.
    """
    terminated = False

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(_TERMINATED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
