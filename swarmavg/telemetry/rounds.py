"""Counts of one averager's rounds, for `Peer.status()`. Numbers only: what a single round was like is in its `StepResult`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMOOTHING = 0.3
"""Weight of the latest round in the moving averages of the rates."""


@dataclass(slots=True)
class RoundCounters:
    """Rounds of one prefix since the averager was made. Bytes are payload; rates are bytes per second of all-reduce."""

    finished: int = 0
    failed: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    rate_sent: float = 0.0
    rate_received: float = 0.0
    last_group_size: int = 0
    last_fraction: float = 0.0
    last_seconds: float = 0.0

    def note_finished(self, *, group_size: int, fraction: float, seconds: float, sent: int, received: int) -> None:
        """A round has ended with a result."""
        new = 1.0 if self.finished == 0 else SMOOTHING
        if seconds > 0:
            self.rate_sent += new * (sent / seconds - self.rate_sent)
            self.rate_received += new * (received / seconds - self.rate_received)
        self.finished += 1
        self.bytes_sent += sent
        self.bytes_received += received
        self.last_group_size = group_size
        self.last_fraction = fraction
        self.last_seconds = seconds

    def note_failed(self) -> None:
        """A group stood, but its round failed on this side."""
        self.failed += 1

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}
