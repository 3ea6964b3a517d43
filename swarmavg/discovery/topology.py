"""Whom to dial, and when: pure decisions. `now` is passed in; the random generator makes runs repeatable.

- Up to `FULL_MESH` reachable peers: a link to each. To avoid crossing dials the smaller id dials first.
- More: `DIALLED_LINKS` random ones, besides those that others dial.
- Bootstrap addresses whose owner is neither linked nor known to be alive, and peers whose records expired, are dialled for
  ever, ever more rarely: that joins a swarm that starts in any order, and heals one that was split.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from swarmavg.discovery.address_book import AddressBook
from swarmavg.identifiers import Address, PeerId

FULL_MESH: Final = 12
DIALLED_LINKS: Final = 6
MAX_DIALS: Final = 8
"""Dials in progress at once."""
PRECEDENCE_SECONDS: Final = 0.5
"""How long the larger id waits for the smaller one to dial."""
RETRY_SECONDS: Final = 30.0
LOST_RETRY_SECONDS: Final = 120.0


class Backoff:
    """Waiting times that double from 1 s to a cap, less up to a half at random so that dials of many spread out."""

    def __init__(self, rng: random.Random, cap: float) -> None:
        self._rng = rng
        self._cap = cap
        self._failures: dict[Hashable, tuple[int, float]] = {}

    def failed(self, key: Hashable, now: float) -> None:
        count = self._failures.get(key, (0, 0.0))[0] + 1
        wait = min(self._cap, 2.0 ** min(count - 1, 30))
        self._failures[key] = (count, now + wait * self._rng.uniform(0.5, 1.0))

    def hold(self, key: Hashable, until: float) -> None:
        """Not before `until`, whatever happened so far."""
        count = self._failures.get(key, (0, 0.0))[0]
        self._failures[key] = (count, until)

    def reset(self, key: Hashable) -> None:
        self._failures.pop(key, None)

    def has_failed(self, key: Hashable) -> bool:
        return self._failures.get(key, (0, 0.0))[0] > 0

    def ready_at(self, key: Hashable) -> float:
        return self._failures[key][1] if key in self._failures else 0.0

    def retain(self, keys: Collection[Hashable]) -> None:
        """Forget all others."""
        self._failures = {key: failure for key, failure in self._failures.items() if key in keys}


@dataclass(frozen=True, slots=True)
class Target:
    """Somebody to dial: at one bootstrap address, or a known peer at its addresses in turn."""

    key: Address | PeerId
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What there is at the moment of a decision."""

    linked: Collection[PeerId]
    dialled_links: int
    dialling: Collection[Address | PeerId]
    avoided: Collection[PeerId]


class Topology:
    """Decides whom to dial; remembers failures and who answered at which bootstrap address."""

    def __init__(self, book: AddressBook, bootstrap: Sequence[Address], own_id: PeerId, rng: random.Random) -> None:
        self._book = book
        self._bootstrap = [address for address in dict.fromkeys(bootstrap) if address.peer_id != own_id]
        self._own_id = own_id
        self._rng = rng
        self._answered: dict[Address, PeerId] = {a: a.peer_id for a in self._bootstrap if a.peer_id is not None}
        self._retry = Backoff(rng, RETRY_SECONDS)
        self._retry_lost = Backoff(rng, LOST_RETRY_SECONDS)

    @property
    def is_small(self) -> bool:
        return len(self._book.reachable()) <= FULL_MESH

    def plan(self, situation: Situation, *, listens: bool, now: float) -> list[Target]:
        """Whom to dial now."""
        self._forget()
        candidates = [*self._bootstrap_targets(situation), *self._mesh_targets(situation, now, listens=listens)]
        ready = [target for target in candidates if self._retry.ready_at(target.key) <= now]
        ready += [target for target in self._lost_targets(situation) if self._retry_lost.ready_at(target.key) <= now]
        room = MAX_DIALS - len(situation.dialling)
        return [target for target in ready if target.key not in situation.dialling][: max(room, 0)]

    def answered(self, target: Target, peer: PeerId) -> None:
        """A dial led to `peer`."""
        if isinstance(target.key, Address):
            self._answered[target.key] = peer
        if peer == self._own_id:
            self._bootstrap = [address for address in self._bootstrap if address != target.key]

    def failed(self, key: Address | PeerId, now: float) -> None:
        """A dial failed, or a link ended soon after it."""
        self._retry.failed(key, now)
        self._retry_lost.failed(key, now)

    def lasted(self, peer: PeerId) -> None:
        """A link proved good: the next failure counts as the first."""
        for key in [peer, *(address for address, who in self._answered.items() if who == peer)]:
            self._retry.reset(key)
            self._retry_lost.reset(key)

    def sent_away(self, peer: PeerId, now: float) -> None:
        """The peer has too many links: leave it alone for a while."""
        self._retry.hold(peer, now + RETRY_SECONDS * self._rng.uniform(0.5, 1.0))

    def _bootstrap_targets(self, situation: Situation) -> list[Target]:
        return [Target(a, (a,)) for a in self._bootstrap if not self._is_settled(self._answered.get(a), situation)]

    def _is_settled(self, peer: PeerId | None, situation: Situation) -> bool:
        """Whether a bootstrap address can be left alone, `peer` being who answered there last."""
        if peer is None:
            return False
        if peer in situation.linked or peer in situation.avoided:
            return True
        return self._book.is_live(peer) and not self._retry.has_failed(peer)

    def _mesh_targets(self, situation: Situation, now: float, *, listens: bool) -> list[Target]:
        wanted = [
            peer
            for peer in self._book.reachable()
            if peer not in situation.linked and peer not in situation.avoided and self._may_dial(peer, now, listens=listens)
        ]
        if not self.is_small:
            need = max(0, DIALLED_LINKS - situation.dialled_links - len(situation.dialling))
            wanted = [peer for peer in wanted if self._retry.ready_at(peer) <= now]
            wanted = self._rng.sample(wanted, min(need, len(wanted)))
        return [self._target(peer) for peer in wanted]

    def _lost_targets(self, situation: Situation) -> list[Target]:
        return [
            self._target(peer) for peer in self._book.lost() if peer not in situation.linked and peer not in situation.avoided
        ]

    def _may_dial(self, peer: PeerId, now: float, *, listens: bool) -> bool:
        return not listens or self._own_id < peer or now >= self._book.known_since(peer) + PRECEDENCE_SECONDS

    def _target(self, peer: PeerId) -> Target:
        return Target(peer, tuple(self._book.addresses_of(peer)))

    def _forget(self) -> None:
        self._retry.retain({*self._bootstrap, *self._book.reachable(), *self._book.lost()})
        self._retry_lost.retain(set(self._book.lost()))
