"""What one averager knows about the others: from the directory, from themselves, and at second hand. No decisions, no I/O.

The word of a peer about itself beats the directory, which beats hearsay. Peers that were silent or refused us are set aside
until they show something new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swarmavg.identifiers import PeerId
from swarmavg.protocol.matchmaking_messages import MAX_LISTED, Candidate
from swarmavg.protocol.matchmaking_presence import VERSIONS, MatchConfig, Phase, Presence, versions_overlap
from swarmavg.protocol.ordering import order_key

MAX_KNOWN = 16_384
"""Peers remembered; more are ignored."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Why a peer is not reckoned with: until it shows a newer presence, or `until`."""

    reason: str
    until: float
    silent: bool
    """Lifted also by any message of its own."""
    firm: bool
    """Lifted by time alone."""


@dataclass(slots=True)
class Known:
    """What is known about one peer."""

    presence: Presence
    due_at: float | None
    """When its next step is expected, or when it may begin."""
    listed: bool = False
    """Whether the directory shows it now."""
    heard: float = -math.inf
    """When a message of its own last came."""
    stopped_at: float | None = None
    """When it was last seen to stop looking without a round."""
    began_at: float = -math.inf
    """When it was last seen to begin a round."""
    misses: int = 0
    """Groups of its bucket that began without it although it was expected; reset by its next attempt."""
    rtt: float | None = None
    excluded: Exclusion | None = None
    superseded: bytes | None = None
    """Incarnation before the present one: a late record of it is ignored."""


@dataclass(slots=True)
class View:
    """Everyone seen under the prefix, except oneself."""

    config: MatchConfig
    config_hash: bytes = field(init=False)
    peers: dict[PeerId, Known] = field(default_factory=dict)
    departed: dict[PeerId, tuple[float, str]] = field(default_factory=dict)
    """Peers that left the directory during this search: when, and what they were."""

    def __post_init__(self) -> None:
        self.config_hash = self.config.hash

    # ---- what comes in

    def record(self, peer: PeerId, presence: Presence, age: float, now: float) -> None:
        """The directory's word."""
        known = self._update(peer, presence, now - age, now, first_hand=False)
        if known is not None:
            known.listed = True

    def word(self, peer: PeerId, presence: Presence, now: float) -> None:
        """A peer's own word, in a message of its own."""
        known = self._update(peer, presence, now, now, first_hand=True)
        if known is not None:
            known.heard = now
            if known.excluded is not None and known.excluded.silent:
                known.excluded = None

    def hearsay(self, candidates: Iterable[Candidate], bits: str, me: PeerId, now: float) -> None:
        """Somebody in the same bucket says that these look there."""
        for candidate in candidates:
            known = self.peers.get(candidate.peer)
            stamp = (candidate.incarnation, candidate.serial)
            if candidate.peer == me or (known is not None and not _is_later(stamp, known.presence)):
                continue
            presence = Presence(
                role=candidate.role,
                phase=Phase.LOOKING,
                bits=bits,
                config_hash=self.config_hash,
                config_digests=self.config.digests,
                due_in=candidate.due_in,
                incarnation=candidate.incarnation,
                serial=candidate.serial,
                attempt=0 if known is None else known.presence.attempt + 1,
            )
            self._update(candidate.peer, presence, now, now, first_hand=False)

    def gone(self, peer: PeerId, now: float, *, keep: bool) -> None:
        """The directory lost a peer; `keep` it while it is linked to us."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.listed = False
        if not keep:
            self.departed[peer] = (now, self.describe(known, None, now))
            del self.peers[peer]

    def _update(self, peer: PeerId, new: Presence, said_at: float, now: float, *, first_hand: bool) -> Known | None:
        due_at = None if new.due_in is None else said_at + new.due_in
        known = self.peers.get(peer)
        if known is None:
            if len(self.peers) >= MAX_KNOWN:
                return None
            self.departed.pop(peer, None)
            known = self.peers[peer] = Known(new, due_at)
            return known
        old = known.presence
        if new.incarnation == old.incarnation:
            if new.serial < old.serial:
                return known
            if new.serial == old.serial:
                if first_hand:
                    known.presence, known.due_at = new, due_at
                return known
        elif new.incarnation == known.superseded and not first_hand:
            return known
        else:
            known.superseded = old.incarnation
        if old.phase is Phase.LOOKING and new.phase is Phase.IDLE:
            known.stopped_at = now
        if new.phase is Phase.IN_ROUND and (old.phase is not Phase.IN_ROUND or new.attempt != old.attempt):
            known.began_at = now
        if new.attempt != old.attempt or new.incarnation != old.incarnation:
            known.misses = 0
        known.presence, known.due_at = new, due_at
        if known.excluded is not None and not known.excluded.firm:
            known.excluded = None
        return known

    # ---- setting aside

    def exclude(self, peer: PeerId, reason: str, *, until: float = math.inf, silent: bool = False, firm: bool = False) -> None:
        known = self.peers.get(peer)
        if known is not None:
            known.excluded = Exclusion(reason, until, silent, firm)

    def is_excluded(self, peer: PeerId, now: float) -> bool:
        known = self.peers.get(peer)
        return known is not None and _excluded(known, now)

    def forgive(self) -> None:
        """Give peers that were set aside one more chance."""
        for known in self.peers.values():
            if known.excluded is not None and not known.excluded.firm:
                known.excluded = None

    def next_pardon(self, now: float) -> float:
        """When the next exclusion ends by itself."""
        ends = (k.excluded.until for k in self.peers.values() if k.excluded is not None and k.excluded.until > now)
        return min(ends, default=math.inf)

    def forget_strangers(self, now: float, silence: float) -> None:
        """Drop peers that neither the directory shows nor anybody has heard for `silence` seconds."""
        for peer in [p for p, k in self.peers.items() if not k.listed and k.heard < now - silence]:
            del self.peers[peer]

    # ---- what is known

    def incompatibility(self, presence: Presence) -> str | None:
        """Why a peer can never meet us as it is; `None` when it can."""
        if not versions_overlap(VERSIONS, presence.versions):
            return "speaks protocol versions {}-{}, ours are {}-{}".format(*presence.versions, *VERSIONS)
        if presence.config_hash != self.config_hash:
            return f"its configuration differs in {self.config.first_difference(presence.config_digests)}"
        return None

    def bucket(self, bits: str, now: float) -> Iterator[tuple[PeerId, Known]]:
        """Compatible peers that look, or will look next, under these bits, and are not set aside."""
        for peer, known in self.peers.items():
            theirs = known.presence
            same = theirs.bits == bits and theirs.config_hash == self.config_hash
            if same and versions_overlap(VERSIONS, theirs.versions) and not _excluded(known, now):
                yield peer, known

    def candidates(self, bits: str, now: float) -> tuple[Candidate, ...]:
        """Those who look in a bucket, the best placed first."""
        looking = [(p, k) for p, k in self.bucket(bits, now) if k.presence.phase is Phase.LOOKING]
        looking.sort(key=lambda item: order_key(bits, item[0]))
        return tuple(
            Candidate(
                peer,
                known.presence.role,
                known.presence.incarnation,
                known.presence.serial,
                None if known.due_at is None else max(0.0, known.due_at - now),
            )
            for peer, known in looking[:MAX_LISTED]
        )

    def describe(self, known: Known, bits: str | None, now: float) -> str:
        """One line for people."""
        presence = known.presence
        problem = self.incompatibility(presence)
        if problem is not None:
            return problem
        if known.excluded is not None:
            return known.excluded.reason
        if bits is not None and presence.bits != bits:
            return f"in another bucket: its group bits are {presence.bits!r}, ours {bits!r}"
        if presence.phase is Phase.LOOKING:
            return "looking" if presence.follows is None else f"looking, with {presence.follows.short} as leader"
        if presence.phase is Phase.IN_ROUND:
            return "in a round"
        if known.stopped_at is not None:
            return f"stopped looking {max(0.0, now - known.stopped_at):.1f} s ago"
        if known.due_at is not None:
            return f"idle, its next step is expected in {max(0.0, known.due_at - now):.1f} s"
        return "idle"

    def report(self, bits: str, now: float) -> dict[PeerId, str]:
        """A line for everyone seen."""
        lines = {peer: f"{what}; left {now - when:.1f} s ago" for peer, (when, what) in self.departed.items()}
        lines.update({peer: self.describe(known, bits, now) for peer, known in self.peers.items()})
        return lines


def _excluded(known: Known, now: float) -> bool:
    return known.excluded is not None and now < known.excluded.until


def _is_later(stamp: tuple[bytes, int], presence: Presence) -> bool:
    return stamp[0] == presence.incarnation and stamp[1] > presence.serial
