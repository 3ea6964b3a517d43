"""A child's line to its parent: reads orders from standard input, writes reports to standard output.

When the parent is gone the child ends at once, whatever it is doing: the demo leaves no orphans.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn, TypeVar

from swarmavg.cli.demo.messages import FromChild, ToChild, decode, encode

_STDIN = 0
_TERMINATED = 128 + signal.SIGTERM

Order = TypeVar("Order", bound=ToChild)


class ParentPipe:
    """Takes standard input and output for itself, and turns SIGTERM into an orderly exit."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        signal.signal(signal.SIGTERM, _leave)
        threading.Thread(target=self._listen, name="parent-pipe", daemon=True).start()

    def read(self, kind: type[Order]) -> Order:
        """Wait for the next order, which must be of this kind."""
        order = decode(self._orders.get())
        if not isinstance(order, kind):
            raise TypeError(f"expected {kind.__name__} from the parent, got {order!r}")
        return order

    def tell(self, message: FromChild) -> None:
        print(encode(message), flush=True)

    def _listen(self) -> None:
        # Not sys.stdin: a thread that waits inside its buffer would hold a lock that the interpreter wants at exit.
        pending = b""
        while chunk := os.read(_STDIN, 65536):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._orders.put(line.decode())
        print("the parent is gone", file=sys.stderr, flush=True)
        os._exit(1)


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(_TERMINATED)
