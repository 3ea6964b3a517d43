"""How long to wait for the other side of a channel: by what was measured on it, unless the user said it.

Two things are judged. **Silence**: no byte at all, though heartbeats are due every half second. **A stall**: heartbeats, but
next to nothing of the payload that the other side owes. A slow line that moves is neither. Nothing here acts, or reads a clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

CONTRIBUTOR_BASE: Final = 10.0
"""Seconds without a byte after which a contributor is suspected at the earliest: twenty heartbeats, and longer than the pauses
of a busy training process (a compilation, a checkpoint, a page-in)."""
REDUCER_BASE: Final = 20.0
"""The same for a reducer, which waits for slow contributors itself: they must be found out before it is."""
GAP_FACTOR: Final = 4.0
"""A channel on which bytes come in bursts is granted this many of its longest gap."""
LONGEST_STRETCH: Final = 6.0
"""Patience never grows beyond so many bases (a minute for contributors, two for reducers): a round has to end some time."""
MIN_RATE: Final = 256.0
"""Bytes per second below which payload that is owed counts as stalled. Heartbeats alone make less than 100, and a line of
1 Mbit/s that is shared by 32 channels still brings 3,900 to each."""
_LOOKS: Final = 32
"""At most so many times within the limit is the payload noted, however often it is looked at."""


class Patience:
    """Judges the other side of one channel. At every heartbeat, `observe` first, then ask `silent` and `stalled`.

    Without an `explicit` limit, the limit starts at `base` seconds and grows with the gaps between arrivals. What happened
    before `now` counts neither for nor against the other side.
    """

    def __init__(self, explicit: float | None, now: float, *, base: float) -> None:
        self._explicit = explicit
        self._base = base
        self._longest_gap = 0.0
        self._last_received = now  # as the channel says it
        self._quiet_since = now  # the same, moved by what was forgiven
        self._bytes_seen = 0
        self._payload = 0
        self._owed: deque[tuple[float, int]] = deque()  # since payload is owed: when it was looked at, and the payload then

    @property
    def limit(self) -> float:
        """Seconds of silence, or of a stall, that are still granted. It never shrinks."""
        if self._explicit is not None:
            return self._explicit
        return min(max(self._base, GAP_FACTOR * self._longest_gap), LONGEST_STRETCH * self._base)

    def observe(self, bytes_received: int, last_received: float, now: float) -> None:
        """Take in the two counters of the channel."""
        self._payload += bytes_received - self._bytes_seen
        self._bytes_seen = bytes_received
        if last_received > self._last_received:
            # Too long by less than the time since the last look, if there was more than one arrival since.
            self._longest_gap = max(self._longest_gap, last_received - self._quiet_since)
            self._last_received = last_received
            self._quiet_since = max(self._quiet_since, last_received)
        self._quiet_since = min(self._quiet_since, now)  # no more is forgiven than was held against it

    def silent(self, now: float) -> float | None:
        """Seconds since the last byte, if they are more than the limit."""
        silence = now - self._quiet_since
        return silence if silence > self.limit else None

    def stalled(self, now: float, owes: bool) -> float | None:
        """Seconds, no less than the limit, in which too little came though payload was owed all the time.

        `owes`: the other side should be sending payload now.
        """
        if not owes:
            self._owed.clear()
            return None
        if not self._owed or now - self._owed[-1][0] >= self.limit / _LOOKS:
            self._owed.append((now, self._payload))
        while len(self._owed) > 1 and now - self._owed[1][0] >= self.limit:
            self._owed.popleft()
        since, before = self._owed[0]
        too_little = self._payload - before < MIN_RATE * (now - since)
        return now - since if too_little and now - since >= self.limit else None

    def discount(self, heartbeat: int) -> None:
        """So many of the bytes received were a heartbeat, which is not payload.

        At the usual rate heartbeats do not matter, but members with short timeouts send them faster than `MIN_RATE`.
        """
        self._payload -= heartbeat

    def forgive(self, seconds: float) -> None:
        """Accuse nobody of the last `seconds`, in which this process itself was held up. Call it before `observe`."""
        self._quiet_since += seconds
        self._owed = deque((at + seconds, payload) for at, payload in self._owed)
