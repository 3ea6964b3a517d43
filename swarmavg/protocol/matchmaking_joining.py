"""The follower's half of matchmaking: ask a leader, keep the lease, go where it points. Part of the sans-IO machine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swarmavg.errors import SwarmError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group
from swarmavg.protocol.matchmaking_begin import read_begin
from swarmavg.protocol.matchmaking_core import Core
from swarmavg.protocol.matchmaking_messages import (
    MAX_LISTED,
    NONCE_BYTES,
    Accepted,
    Join,
    Leave,
    Redirect,
    Refuse,
    Rejected,
    Released,
    Renew,
)
from swarmavg.protocol.matchmaking_states import Cause, State
from swarmavg.protocol.ordering import order_key

_REMEMBERED = 16

MAX_REDIRECTS = 3
"""After so many, the join is final: whoever leads and has room must accept."""


@dataclass(slots=True)
class Bond:
    """The one join that is out, or accepted. An old begin, or an old answer, does not fit another nonce."""

    leader: PeerId
    nonce: bytes
    heard: float
    asked_at: float
    unanswered_since: float | None
    """When the first question that has no answer yet was put."""


class Joiner:
    """Owns the bond."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.bond: Bond | None = None
        self._lapsed: tuple[Bond, float] | None = None
        """A join to a leader that was lost, and until when its begin may still come from a groupmate."""
        self._obeyed: deque[GroupId] = deque(maxlen=_REMEMBERED)
        """The latest groups: copies of their begins may come when the round is long over."""

    # ---- towards the leader

    def join(self, leader: PeerId, now: float) -> None:
        core = self._core
        core.move(Cause.JOIN, now, f"joins {leader.short}")
        core.follows = leader
        self.bond = Bond(leader, core.rng.randbytes(NONCE_BYTES), now, now, now)
        self._ask(self.bond, now)

    def leave(self, reason: str, now: float) -> None:
        """Give the join up, if there is one, and say so. The state is the caller's business."""
        bond = self._drop()
        if bond is not None:
            self._core.send(bond.leader, Leave(nonce=bond.nonce, reason=reason), now)

    def part(self, why: str, now: float, *, silent: bool = False, until: float | None = None, dead: bool = False) -> None:
        """Leave the leader and look on. `silent` or `until` set it aside; a `dead` one may have sent its begin to others."""
        core, bond = self._core, self.bond
        if bond is None:
            return
        if silent or until is not None:
            core.view.exclude(bond.leader, why, until=math.inf if until is None else until, silent=silent)
            core.looking.refusals[bond.leader] = why
        self.leave(why, now)
        if dead:
            self._lapsed = (bond, now + 2 * core.request_timeout)
        core.move(Cause.PARTED, now, f"parts from {bond.leader.short}: {why}")

    def _drop(self) -> Bond | None:
        bond, self.bond = self.bond, None
        self._core.follows = None
        return bond

    def _ask(self, bond: Bond, now: float) -> None:
        core, search = self._core, self._core.looking
        patience = search.patience(core.request_timeout)
        window = max(0.0, min(search.window_end, 1e9) - now)
        deadline = None if math.isinf(patience) else max(0.0, patience - now)
        bond.asked_at = now
        if bond.unanswered_since is None:
            bond.unanswered_since = now
        if core.state is State.FOLLOWING:
            candidates = core.candidates(now)
            core.send(bond.leader, Renew(nonce=bond.nonce, window=window, deadline=deadline, candidates=candidates), now)
            return
        avoid = [peer for peer in core.view.peers if core.view.is_excluded(peer, now)]
        message = Join(
            nonce=bond.nonce,
            min_group_size=core.settings.min_group_size,
            window=window,
            deadline=deadline,
            starts_in=max(0.0, search.starts_at - now),
            bandwidth=search.request.bandwidth,
            gather=search.request.gather,
            final=search.redirects >= MAX_REDIRECTS,
            avoid=tuple(avoid[:MAX_LISTED]),
            candidates=core.candidates(now),
        )
        core.send(bond.leader, message, now)

    # ---- time

    def expire(self, now: float, alarms: list[float]) -> bool:
        """Repeat the question, or leave a leader that is silent for a request timeout. True when something changed."""
        bond, timeout = self.bond, self._core.request_timeout
        if bond is None:
            return False
        if now >= bond.heard + timeout:
            asking = self._core.state is State.JOINING
            self.part("did not answer a join" if asking else "fell silent as leader", now, silent=True)
            return True
        if now >= bond.asked_at + timeout / 3:
            self._ask(bond, now)
        alarms += [bond.heard + timeout, bond.asked_at + timeout / 3]
        return False

    def ask_again(self, peer: PeerId, now: float) -> None:
        """There is reason to doubt that the leader knows us still: do not wait for the next renewal."""
        if self.bond is not None and self.bond.leader == peer and now > self.bond.asked_at:
            self._ask(self.bond, now)

    # ---- answers

    def on_accepted(self, peer: PeerId, message: Accepted, now: float, hand_over: Callable[[PeerId, float], None]) -> None:
        """`hand_over(leader, now)` sends our own followers along."""
        bond = self._match(peer, message.nonce)
        if bond is None:
            self._core.send(peer, Leave(nonce=message.nonce, reason="this join was given up"), now)
            return
        known = self._core.view.peers.get(peer)
        if known is not None and bond.unanswered_since is not None:
            known.rtt = now - bond.unanswered_since
        bond.heard, bond.unanswered_since = now, None
        if self._core.state is State.JOINING:
            self._core.move(Cause.ACCEPTED, now, f"accepted by {peer.short}")
            hand_over(peer, now)
            self._ask(bond, now)

    def on_redirect(self, peer: PeerId, message: Redirect, now: float) -> None:
        if self._match(peer, message.nonce) is None:
            return
        core = self._core
        core.looking.redirects += 1
        self._drop()
        core.move(Cause.PARTED, now, f"{peer.short} points to {message.to.short}")
        if self._may_follow(peer, message.to, now):
            self.join(message.to, now)
        else:
            core.view.exclude(peer, "redirects to one that cannot be reached", until=now + core.request_timeout)

    def on_rejected(self, peer: PeerId, message: Rejected, now: float) -> None:
        if self._match(peer, message.nonce) is None:
            return
        core = self._core
        self._drop()
        core.move(Cause.PARTED, now, f"rejected by {peer.short}: {message.reason}")
        if message.code != "unknown":
            core.looking.refusals[peer] = f"refused: {message.reason}"
            until, firm = now + core.request_timeout, message.code == "size"
            core.view.exclude(peer, f"refused: {message.reason}", until=until, firm=firm)

    def on_released(self, peer: PeerId, message: Released, now: float) -> None:
        if self._match(peer, message.nonce) is None:
            return
        self._core.looking.redirects += 1
        self._drop()
        self._core.move(Cause.PARTED, now, f"released by {peer.short}")

    # ---- begins

    def obey(self, signed: bytes, sender: PeerId | None, now: float, hand_over: Callable[[PeerId, float], None]) -> None:
        """Obey a begin that names the nonce of the latest join, from whomever it came; refuse it for a reason otherwise.

        The join to a leader that was lost counts too: its begin may have reached others, who bring it.
        Raises `RemoteProtocolError` when it is malformed or not signed by its leader.
        """
        core, bond = self._core, self.bond
        group = read_begin(signed, prefix=core.settings.prefix, config_hash=core.view.config_hash, signer=core.signer)
        if group.group_id in self._obeyed:
            return
        lapsed = self._lapsed[0] if self._lapsed is not None and now <= self._lapsed[1] and core.state.looks else None
        named = next((b for b in (bond, lapsed) if b is not None and _names(group, core.me, b)), None)
        if named is None:
            if sender is not None and core.me in group:
                core.send(sender, Refuse(group_id=group.group_id, reason="it does not wait for this begin any more"), now)
            return
        problem = self._problem(group)
        if problem is not None:
            core.send(group.leader, Refuse(group_id=group.group_id, reason=problem), now)
            if named is bond:
                self.part(f"its begin is refused: {problem}", now, silent=True)
            return
        if named is lapsed:
            self.leave("the group that it had joined before stands", now)
        hand_over(group.leader, now)
        self.bond = self._lapsed = None
        self._obeyed.append(group.group_id)
        core.assemble(group, Cause.BEGIN_RECEIVED, now)

    def _problem(self, group: Group) -> str | None:
        """Why a begin that names us cannot be obeyed."""
        core, own = self._core, group.member(self._core.me)
        if group.bits != core.bits:
            return f"its group bits are {group.bits!r}, ours {core.bits!r}"
        request = core.looking.request
        if (own.role, own.gather, own.bandwidth) != (core.settings.role, request.gather, request.bandwidth):
            return "it states our role, bandwidth or gathered value wrongly"
        target = core.settings.target_group_size
        if len(group.members) < core.settings.min_group_size or (target is not None and len(group.members) > target):
            return f"a group of {len(group.members)} is outside of our limits"
        try:
            plan_hash = core.plan_hash(group.members)
        except (ValueError, SwarmError) as error:
            return f"there is no plan for this group: {error}"
        if plan_hash != group.plan_hash:
            return "its plan of who reduces what differs from ours"
        return None

    # ---- helpers

    def _match(self, peer: PeerId, nonce: bytes) -> Bond | None:
        bond = self.bond
        return bond if bond is not None and bond.leader == peer and bond.nonce == nonce else None

    def _may_follow(self, redirector: PeerId, to: PeerId, now: float) -> bool:
        """A redirect goes to a smaller key than the redirector's, and here to one that is known and not set aside."""
        core = self._core
        known = core.view.peers.get(to)
        if known is None or not known.presence.role.leads or core.view.incompatibility(known.presence) is not None:
            return False
        smaller = order_key(core.bits, to) < order_key(core.bits, redirector)
        below_me = not core.settings.role.leads or order_key(core.bits, to) < order_key(core.bits, core.me)
        return smaller and below_me and not core.view.is_excluded(to, now)


def _names(group: Group, me: PeerId, bond: Bond) -> bool:
    return group.leader == bond.leader and me in group and group.member(me).nonce == bond.nonce
