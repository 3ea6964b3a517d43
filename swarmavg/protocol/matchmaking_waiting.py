"""For whom a leader waits, how long, and how it makes sure that they are there. Part of the sans-IO machine.

A presence **holds up** the group when its peer looks and belongs to this leader, or is expected within the window and has not
missed three rounds. One without an estimate of its next step counts as expected: it is probably about to take its first. One
that began a round while we were looking has had its turn: nobody waits for its next one.
Whoever holds up a group that could begin is probed; silence for a request timeout ends the waiting. Clients cannot be
dialled, so they are not probed: they hold up for one request timeout, or as long as messages of theirs keep coming.
"""

from __future__ import annotations

from collections.abc import Collection

from swarmavg.identifiers import PeerId
from swarmavg.protocol.matchmaking_core import MAX_MISSES, Core
from swarmavg.protocol.matchmaking_messages import Probe
from swarmavg.protocol.matchmaking_presence import Phase
from swarmavg.protocol.matchmaking_view import Known
from swarmavg.protocol.ordering import Deal

SHORTEST_SETTLING = 0.010
LONGEST_MEASURING = 0.25
"""Seconds for which the first renewal of a member, which measures the round trip, is waited for while settling."""
PROBE_GRACE = 0.1
"""Part of the request timeout that a presence may hold up the group before it is probed."""


class Waiting:
    """Who holds up the group, and since when."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._since: dict[PeerId, float] = {}
        self._probed: dict[PeerId, float] = {}
        self._missing = False
        self._settling_since: float | None = None

    @property
    def holds_up(self) -> frozenset[PeerId]:
        return frozenset(self._since)

    def rest(self) -> None:
        """The group could not begin anyway: nobody holds it up."""
        self._since.clear()
        self._probed.clear()
        self.unsettle()

    def unsettle(self) -> None:
        self._settling_since = None

    def watch(self, deal: Deal, members: Collection[PeerId], closes: float, now: float, alarms: list[float]) -> bool:
        """Bring the picture up to date, probe, and set the silent aside. True when somebody was."""
        core = self._core
        holding = self._holding(deal, members, closes, now)
        bucket = core.view.bucket(core.bits, now)
        absent = any(known.presence.phase is not Phase.LOOKING for peer, known in bucket if peer not in members)
        self._missing = absent or bool(holding)
        self._since = {peer: self._since.get(peer, now) for peer in holding}
        self._probed = {peer: when for peer, when in self._probed.items() if peer in holding}
        silent = [peer for peer in holding if now >= self._patience(peer)]
        for peer in silent:
            core.view.exclude(peer, self._why_silent(peer), silent=True)
            del self._since[peer]
        for peer in self._since:
            alarms.append(self._patience(peer))
            self._probe(peer, now, alarms)
        if core.looking.regroup and now < core.looking.regroup_until:
            alarms.append(core.looking.regroup_until)
        return bool(silent)

    def is_settled(self, members: Collection[PeerId], now: float, alarms: list[float]) -> bool:
        """If someone is missing from the picture, news of him may be under way: give it max(10 ms, two round trips)."""
        if not self._missing:
            return True
        if self._settling_since is None:
            self._settling_since = now
        trips = [self._core.view.peers[peer].rtt for peer in members if peer in self._core.view.peers]
        measured = [rtt for rtt in trips if rtt is not None]
        needed = max([SHORTEST_SETTLING, *(2 * rtt for rtt in measured)])
        if len(measured) < len(trips):
            needed = max(needed, LONGEST_MEASURING)
        due = self._settling_since + needed
        if now >= due:
            return True
        alarms.append(due)
        return False

    def _holding(self, deal: Deal, members: Collection[PeerId], closes: float, now: float) -> set[PeerId]:
        core, search = self._core, self._core.looking
        holding = {
            peer
            for peer, known in core.view.bucket(core.bits, now)
            if peer not in members and self._holds(peer, known, deal, closes)
        }
        if now < search.regroup_until:
            alive = (p for p in search.regroup if p in core.view.peers and not core.view.is_excluded(p, now))
            holding.update(peer for peer in alive if peer not in members and not self._is_elsewhere(peer, deal))
        return holding

    def _holds(self, peer: PeerId, known: Known, deal: Deal, closes: float) -> bool:
        if known.due_at is not None and known.due_at > closes:
            return False
        if known.presence.phase is Phase.LOOKING:
            return not self._is_elsewhere(peer, deal)
        return known.misses < MAX_MISSES and known.began_at < self._core.looking.started

    def _is_elsewhere(self, peer: PeerId, deal: Deal) -> bool:
        """Whether a looking peer belongs to another leader, by the deal or by its own word."""
        presence = self._core.view.peers[peer].presence
        if presence.phase is not Phase.LOOKING:
            return False
        if deal.head_of.get(peer) != self._core.me:
            return True
        leader = presence.follows
        if leader in (None, self._core.me, peer):
            return False
        # whom it asks leads another group, or is out of our sight; anybody else will send it here
        return deal.head_of.get(leader, leader) == leader

    def _patience(self, peer: PeerId) -> float:
        return max(self._since[peer], self._core.view.peers[peer].heard) + self._core.request_timeout

    def _probe(self, peer: PeerId, now: float, alarms: list[float]) -> None:
        if not self._core.view.peers[peer].presence.role.leads:
            return
        timeout = self._core.request_timeout
        last = self._probed.get(peer)
        due = self._since[peer] + PROBE_GRACE * timeout if last is None else last + timeout / 3
        if now >= due:
            self._core.send(peer, Probe(), now)
            self._probed[peer] = now
            due = now + timeout / 3
        alarms.append(due)

    def _why_silent(self, peer: PeerId) -> str:
        leads = self._core.view.peers[peer].presence.role.leads
        return "did not answer a probe" if leads else "a client that did not come within the request timeout"
