"""The leader's half of matchmaking: answer joins, hold leases, decide when the group begins. Part of the sans-IO machine."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from swarmavg.errors import SwarmError
from swarmavg.identifiers import GROUP_ID_BYTES, GroupId, PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking_begin import MAX_GATHERED_BYTES, MAX_GROUP_SIZE, sign_begin
from swarmavg.protocol.matchmaking_core import Core
from swarmavg.protocol.matchmaking_messages import (
    NONCE_BYTES,
    Accepted,
    Begin,
    Join,
    Redirect,
    Rejected,
    Released,
    Renew,
)
from swarmavg.protocol.matchmaking_presence import Presence
from swarmavg.protocol.matchmaking_states import Cause, State
from swarmavg.protocol.matchmaking_waiting import Waiting
from swarmavg.protocol.ordering import Deal, order_key

_REMEMBERED = 4096
"""Peers whose settled nonces are kept, and how many of each."""
_NONCES = 4


@dataclass(slots=True)
class Follower:
    """One accepted join."""

    nonce: bytes
    role: Role
    min_group_size: int
    window_end: float
    patience: float
    starts_at: float
    bandwidth: float | None
    gather: bytes
    final: bool
    avoid: frozenset[PeerId]
    heard: float
    accepted_at: float | None
    """When the acceptance went out that the next renewal answers: one round trip."""


class Leader:
    """Owns the followers."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.followers: dict[PeerId, Follower] = {}
        self.waiting = Waiting(core)
        self._settled: dict[PeerId, deque[bytes]] = {}
        """The latest nonces of each peer that have had their answer: a belated copy of such a join is void."""

    # ---- joins

    def on_join(self, peer: PeerId, presence: Presence, join: Join, now: float) -> None:
        """Answer at once: accepted, redirect, or rejected."""
        core = self._core
        group = core.group
        if core.state is State.IN_ROUND and group is not None and _is_member(group, peer, join.nonce):
            core.send(peer, Begin(signed=group.signed), now)
            return
        if join.nonce in self._settled.get(peer, ()):
            self._reject(peer, join.nonce, "unknown", "this join was answered already", now)
            return
        refusal = self._refusal(peer, presence)
        if refusal is not None:
            self._reject(peer, join.nonce, *refusal, now)
            return
        known = self.followers.get(peer)
        if known is not None and known.nonce == join.nonce:
            known.heard = now
            core.send(peer, Accepted(nonce=join.nonce, candidates=core.candidates(now)), now)
            return
        self.followers.pop(peer, None)
        self._place(peer, join, now)

    def _refusal(self, peer: PeerId, presence: Presence) -> tuple[str, str] | None:
        """Code and reason why this peer cannot be led from here at all."""
        core = self._core
        if core.state is State.IN_ROUND:
            return "not-looking", "in a round"
        if not core.state.looks:
            return "not-looking", "not looking for a group now"
        if not core.settings.role.leads:
            return "client", "a client never leads"
        problem = core.view.incompatibility(presence)
        if problem is not None:
            return "incompatible", problem
        if presence.bits != core.bits:
            return "incompatible", f"in another bucket: its group bits are {core.bits!r}, yours {presence.bits!r}"
        if presence.role.leads and order_key(core.bits, peer) < order_key(core.bits, core.me):
            return "following", "of two that can lead, the one with the smaller key does"
        return None

    def _place(self, peer: PeerId, join: Join, now: float) -> None:
        core = self._core
        better = None if join.final else self._better_place(peer, join, now)
        if better is not None:
            self._settle(peer, join.nonce)
            core.send(peer, Redirect(nonce=join.nonce, to=better, candidates=core.candidates(now)), now)
        elif core.state is State.FOLLOWING:
            leader = "another leader" if core.follows is None else core.follows.short
            self._reject(peer, join.nonce, "following", f"follows {leader}", now)
        elif (problem := self._schedule_problem(join, now)) is not None:
            self._reject(peer, join.nonce, "schedule", problem, now)
        elif sum(len(f.gather) for f in self.followers.values()) + len(join.gather) > MAX_GATHERED_BYTES:
            self._reject(peer, join.nonce, "size", "the gathered values of the group would be too large", now)
        elif not self._has_room(peer, now):
            self._reject(peer, join.nonce, "full", f"the group is full with {1 + len(self.followers)} members", now)
        else:
            self._accept(peer, join, now)

    def _better_place(self, peer: PeerId, join: Join, now: float) -> PeerId | None:
        """The leader whom the joiner should ask instead: always one with a smaller key than ours."""
        core = self._core
        to = core.follows if core.state in (State.JOINING, State.FOLLOWING) else core.deal(now).head_of.get(peer)
        if to is None or to in (core.me, peer) or to in join.avoid or core.view.is_excluded(to, now):
            return None
        return to if order_key(core.bits, to) < order_key(core.bits, core.me) else None

    def _schedule_problem(self, join: Join, now: float) -> str | None:
        closes, earliest = self.closes(), self._earliest()
        if now + join.starts_in > max(closes, earliest):
            return f"it may not start for {join.starts_in:.1f} s, after the window of this group"
        if join.deadline is not None and now + join.deadline < earliest:
            return f"the group starts in {earliest - now:.1f} s, after its deadline"
        return None

    def _has_room(self, peer: PeerId, now: float) -> bool:
        """Room there is, or is made by releasing one who belongs elsewhere for one who belongs here."""
        limit = self._core.settings.target_group_size or MAX_GROUP_SIZE
        if 1 + len(self.followers) < limit:
            return True
        deal = self._core.deal(now)
        return deal.head_of.get(peer) == self._core.me and self._release_one(deal, now)

    def _accept(self, peer: PeerId, join: Join, now: float) -> None:
        core = self._core
        known = core.view.peers.get(peer)
        self.followers[peer] = Follower(
            nonce=join.nonce,
            role=Role.NODE if known is None else known.presence.role,
            min_group_size=join.min_group_size,
            window_end=now + join.window,
            patience=math.inf if join.deadline is None else now + join.deadline,
            starts_at=now + join.starts_in,
            bandwidth=join.bandwidth,
            gather=join.gather,
            final=join.final,
            avoid=frozenset(join.avoid),
            heard=now,
            accepted_at=now,
        )
        if known is not None:
            known.excluded = None
        core.send(peer, Accepted(nonce=join.nonce, candidates=core.candidates(now)), now)

    def _settle(self, peer: PeerId, nonce: bytes) -> None:
        if peer not in self._settled and len(self._settled) >= _REMEMBERED:
            del self._settled[next(iter(self._settled))]
        self._settled.setdefault(peer, deque(maxlen=_NONCES)).append(nonce)

    def _reject(self, peer: PeerId, nonce: bytes, code: str, reason: str, now: float) -> None:
        self._settle(peer, nonce)
        candidates = self._core.candidates(now) if code != "incompatible" else ()
        self._core.send(peer, Rejected(nonce=nonce, code=code, reason=reason, candidates=candidates), now)

    # ---- leases

    def on_renew(self, peer: PeerId, renew: Renew, now: float) -> None:
        core, follower, group = self._core, self.followers.get(peer), self._core.group
        if follower is None or follower.nonce != renew.nonce:
            if core.state is State.IN_ROUND and group is not None and _is_member(group, peer, renew.nonce):
                core.send(peer, Begin(signed=group.signed), now)
            else:
                self._reject(peer, renew.nonce, "unknown", "this join is not, or no longer, accepted here", now)
            return
        known = core.view.peers.get(peer)
        if follower.accepted_at is not None and known is not None:
            known.rtt = now - follower.accepted_at
        follower.heard, follower.accepted_at = now, None
        follower.window_end = now + renew.window
        follower.patience = math.inf if renew.deadline is None else now + renew.deadline
        core.send(peer, Accepted(nonce=renew.nonce, candidates=core.candidates(now)), now)

    def on_leave(self, peer: PeerId, nonce: bytes) -> None:
        self._settle(peer, nonce)
        follower = self.followers.get(peer)
        if follower is not None and follower.nonce == nonce:
            del self.followers[peer]

    def lost(self, peer: PeerId) -> None:
        self.followers.pop(peer, None)

    def expire(self, now: float, alarms: list[float]) -> bool:
        """Drop followers that were silent for a request timeout. True when something changed."""
        timeout = self._core.request_timeout
        silent = [peer for peer, follower in self.followers.items() if now >= follower.heard + timeout]
        for peer in silent:
            del self.followers[peer]
            self._core.view.exclude(peer, "fell silent as follower", silent=True)
            self._core.note(now, f"drops {peer.short}: silent")
        alarms += [follower.heard + timeout for follower in self.followers.values()]
        return bool(silent)

    def hand_over(self, leader: PeerId, now: float) -> None:
        """Send the followers along to the leader that accepted us. A client of ours may have its reasons to avoid it."""
        for peer, follower in self.followers.items():
            self._settle(peer, follower.nonce)
            self._core.send(peer, self._pointer(follower, leader, now), now)
        self.followers.clear()

    def _pointer(self, follower: Follower, leader: PeerId, now: float) -> Redirect | Released:
        candidates = self._core.candidates(now)
        if leader in follower.avoid:
            return Released(nonce=follower.nonce, candidates=candidates)
        return Redirect(nonce=follower.nonce, to=leader, candidates=candidates)

    def dismiss(self, code: str, reason: str, now: float) -> None:
        """There will be no group here."""
        for peer, follower in self.followers.items():
            self._reject(peer, follower.nonce, code, reason, now)
        self.followers.clear()

    def _release_one(self, deal: Deal, now: float) -> bool:
        """Let one go who belongs to another head that it can reach; the worst placed first. False when there is none."""
        core = self._core
        movable = [
            peer
            for peer, follower in self.followers.items()
            if not follower.final and deal.head_of.get(peer, core.me) not in {core.me, *follower.avoid}
        ]
        if not movable:
            return False
        peer = max(movable, key=lambda one: order_key(core.bits, one))
        follower = self.followers.pop(peer)
        self._settle(peer, follower.nonce)
        core.send(peer, Released(nonce=follower.nonce, candidates=core.candidates(now)), now)
        return True

    # ---- when to begin

    def closes(self) -> float:
        """The window of the group ends with the earliest of its members' windows and deadlines."""
        core, search = self._core, self._core.looking
        ends = [search.window_end, search.patience(core.request_timeout)]
        ends += [min(follower.window_end, follower.patience) for follower in self.followers.values()]
        return min(ends)

    def _earliest(self) -> float:
        return max([self._core.looking.starts_at, *(follower.starts_at for follower in self.followers.values())])

    def consider(self, now: float, alarms: list[float]) -> bool:
        """Begin, if it is time. True when something changed."""
        core = self._core
        deal = core.deal(now)
        if 1 + len(self.followers) > deal.share(core.me) and self._release_one(deal, now):
            return True
        earliest = self._earliest()
        closes = max(self.closes(), earliest)
        if now >= closes:
            if self._drop_the_demanding(now):
                self._begin(now)
                return True
            return False
        alarms.append(closes)
        if not self._is_enough():
            self.waiting.rest()
            return False
        full = 1 + len(self.followers) == (core.settings.target_group_size or MAX_GROUP_SIZE)
        if self.waiting.watch(deal, self.followers, closes, now, alarms):
            return True
        if not full and self.waiting.holds_up:
            self.waiting.unsettle()
            return False
        if now < earliest:
            alarms.append(earliest)
            return False
        if not self.waiting.is_settled(self.followers, now, alarms):
            return False
        self._begin(now)
        return True

    def _is_enough(self) -> bool:
        needed = [self._core.settings.min_group_size, *(f.min_group_size for f in self.followers.values())]
        return 1 + len(self.followers) >= max(needed)

    def _drop_the_demanding(self, now: float) -> bool:
        """At the end of the window: do without those who want a larger group than there is. False when too few are left."""
        needs = sorted((follower.min_group_size, peer) for peer, follower in self.followers.items())
        keep = len(needs)
        while keep and needs[keep - 1][0] > 1 + keep:
            keep -= 1
        own_need = self._core.settings.min_group_size
        if 1 + keep < own_need:
            self._set_free(own_need, now)
            return False
        for need, peer in needs[keep:]:
            follower = self.followers.pop(peer)
            self._reject(peer, follower.nonce, "size", f"begins with {1 + keep}, you need {need}", now)
        return True

    def _set_free(self, own_need: int, now: float) -> None:
        """We want more members than came: do not keep those from each other who would do without us."""
        others = self.followers.values()
        if any(f.role.leads for f in others) and any(f.min_group_size <= len(others) for f in others):
            self.dismiss("size", f"needs a group of at least {own_need}, and {1 + len(others)} came", now)

    def _begin(self, now: float) -> None:
        core = self._core
        members = self._members()
        core.rng.shuffle(members)
        order = tuple(members)
        try:
            plan_hash = core.plan_hash(order)
        except (ValueError, SwarmError) as error:
            # no plan exists for these members (say, all bandwidths are 0); they must not wait for one
            core.looking.refusals.update(dict.fromkeys(self.followers, f"no plan with it: {error}"))
            for peer in self.followers:
                core.view.exclude(peer, f"no plan with it: {error}", until=now + core.request_timeout)
            self.dismiss("size", f"there is no plan for this group: {error}", now)
            return
        group = sign_begin(
            group_id=GroupId(core.rng.randbytes(GROUP_ID_BYTES)),
            leader=core.me,
            members=order,
            bits=core.bits,
            plan_hash=plan_hash,
            prefix=core.settings.prefix,
            config_hash=core.view.config_hash,
            signer=core.signer,
        )
        for peer, follower in self.followers.items():
            core.send(peer, Begin(signed=group.signed), now)
            self._settle(peer, follower.nonce)
        self.followers.clear()
        self.waiting.rest()
        core.assemble(group, Cause.BEGIN_SENT, now)

    def _members(self) -> list[Member]:
        core, request = self._core, self._core.looking.request
        own = Member(
            peer_id=core.me,
            nonce=core.rng.randbytes(NONCE_BYTES),
            role=core.settings.role,
            bandwidth=request.bandwidth,
            gather=request.gather,
        )
        others = [
            Member(peer_id=peer, nonce=f.nonce, role=f.role, bandwidth=f.bandwidth, gather=f.gather)
            for peer, f in self.followers.items()
        ]
        return [own, *sorted(others, key=lambda member: member.peer_id)]


def _is_member(group: Group, peer: PeerId, nonce: bytes) -> bool:
    return any(member.peer_id == peer and member.nonce == nonce for member in group.members)
