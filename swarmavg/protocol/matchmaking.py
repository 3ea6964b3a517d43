"""Matchmaking as a sans-IO machine: averagers that look at the same time find each other and agree on one group.

Theory of operation. Everyone knows, roughly, who else looks (the directory, and what messages tell). Everyone deals the looking
peers into groups by the same pure function (`ordering.deal`): its heads lead, the others join their head directly. A peer that
can lead only ever joins one with a smaller key, and peers that cannot lead are never joined, so nobody can wait in a circle.
The leader alone decides who belongs to the group, and its signed begin is the one truth: a member obeys it if, and only if, it
names the nonce of the member's latest join, so nobody is in two groups. Views that differ cost a redirect; a peer that vanished
costs one request timeout.

Use: `receive(event, now)`, then carry out `drain_effects()`, and deliver `Tick` at `next_deadline()`. No clock inside: `now`
may count from any moment, and never goes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from swarmavg.errors import LocalProtocolError, RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Group, Role
from swarmavg.protocol.matchmaking_begin import Signer
from swarmavg.protocol.matchmaking_core import Core, PlanHash, Search
from swarmavg.protocol.matchmaking_events import (
    BeginSeen,
    BitsChanged,
    Cancel,
    Close,
    Failed,
    LinkLost,
    Look,
    LookRequest,
    MatchEffect,
    MatchEvent,
    MatchSettings,
    MemberLost,
    MessageReceived,
    PeerFailed,
    PresenceGone,
    PresenceSeen,
    RoundFinished,
    Tick,
    Withdraw,
)
from swarmavg.protocol.matchmaking_joining import Joiner
from swarmavg.protocol.matchmaking_leading import Leader
from swarmavg.protocol.matchmaking_messages import (
    Accepted,
    Alive,
    Begin,
    Join,
    Leave,
    Probe,
    Redirect,
    Refuse,
    Rejected,
    Released,
    Renew,
)
from swarmavg.protocol.matchmaking_presence import Phase, Presence
from swarmavg.protocol.matchmaking_states import Cause, State
from swarmavg.protocol.ordering import order_key

__all__ = ["LookRequest", "Matchmaking"]

_MAX_PASSES: Final = 10_000
"""Changes that one event may bring about in a row; more is a loop, and a bug here."""
_FORGET_AFTER: Final = 60.0
_SMOOTHING: Final = 0.5
"""Weight of the latest interval in the moving average of the time between steps."""


class Matchmaking:
    """The machine of one averager."""

    def __init__(
        self, me: PeerId, settings: MatchSettings, *, signer: Signer, plan_hash: PlanHash, rng: random.Random, bits: str = ""
    ) -> None:
        self._core = Core(me=me, settings=settings, signer=signer, plan_hash=plan_hash, rng=rng, bits=bits)
        self._joiner = Joiner(self._core)
        self._leader = Leader(self._core)
        self._alarm: float | None = None
        self._started: float | None = None
        self._interval: float | None = None
        self._survivors: frozenset[PeerId] = frozenset()
        self._is_retry = False
        self._lost: tuple[Group | None, set[PeerId]] = (None, set())
        """Members of the standing group that take no part."""

    # ---- for the driver

    @property
    def state(self) -> State:
        return self._core.state

    @property
    def group(self) -> Group | None:
        """The group that stands, until its round is finished."""
        return self._core.group

    @property
    def follows(self) -> PeerId | None:
        """Who was asked to lead, or leads, this peer."""
        return self._core.follows

    def presence(self, now: float) -> Presence:
        """The own presence as of now, for the directory."""
        return replace(self._core.presence(now), follows=None)

    def next_deadline(self) -> float | None:
        """When `Tick` must be delivered if nothing else happens before; `None` = never."""
        return self._alarm

    def drain_effects(self) -> list[MatchEffect]:
        """What is to be done, in order. Each effect is handed out once."""
        effects = self._core.effects[:]
        self._core.effects.clear()
        return effects

    def story(self) -> list[str]:
        """The latest moves and messages, for finding out why something happened."""
        return list(self._core.story)

    def incompatibility(self, presence: Presence) -> str | None:
        """Why a peer can never meet us as it is; `None` when it can."""
        return self._core.view.incompatibility(presence)

    def seen(self, now: float) -> dict[PeerId, str]:
        """What is known about everyone seen, a line each."""
        lines = self._core.view.report(self._core.bits, now)
        if self._core.search is not None:
            lines.update(self._core.search.refusals)
        return lines

    def receive(self, event: MatchEvent, now: float) -> None:
        """Take in what happened. Raises `LocalProtocolError` for a command that the state does not allow."""
        if self._core.state is State.CLOSED:
            return
        handler = self._HANDLERS[type(event)]
        handler(self, event, now)
        self._settle_down(now)

    # ---- time

    def _settle_down(self, now: float) -> None:
        """Apply the rules until nothing changes, and remember when the next of them will be due."""
        for _ in range(_MAX_PASSES):
            alarms: list[float] = []
            if not self._pass(now, alarms):
                self._alarm = min((alarm for alarm in alarms if alarm > now), default=None)
                return
        raise LocalProtocolError("matchmaking does not come to rest:\n" + "\n".join(self.story()[-20:]))

    def _pass(self, now: float, alarms: list[float]) -> bool:
        core = self._core
        if not core.state.looks:
            return False
        search = core.looking
        if now >= search.deadline:
            self._fail(now)
            return True
        if self._joiner.expire(now, alarms) or self._leader.expire(now, alarms) or self._steer(now, alarms):
            return True
        if core.state is State.LEADING and self._leader.consider(now, alarms):
            return True
        if now >= search.window_end:
            self._reopen(search, now)
            return True
        alarms += [search.deadline, search.window_end]
        return False

    def _steer(self, now: float, alarms: list[float]) -> bool:
        """Lead, or join the head to whom the deal gives us."""
        core = self._core
        if core.state not in (State.SEARCHING, State.LEADING):
            return False
        alarms.append(core.view.next_pardon(now))
        head = core.deal(now).head_of.get(core.me)
        if head == core.me:
            if core.state is State.LEADING:
                return False
            core.follows = core.me
            core.move(Cause.LEAD, now)
            return True
        if head is None:
            return False
        self._joiner.join(head, now)
        return True

    def _reopen(self, search: Search, now: float) -> None:
        """The window closed without a group: another attempt, with the same followers, and one more chance for the silent."""
        while search.window_end <= now:
            search.window_end += search.window
        self._core.attempt += 1
        self._core.view.forgive()
        self._core.announce(now)

    # ---- local commands

    def _on_look(self, event: Look, now: float) -> None:
        core, request = self._core, event.request
        if core.state is not State.IDLE:
            raise LocalProtocolError(f"look in state {core.state.value}")
        self._measure_interval(now)
        window = request.window if request.window is not None else core.settings.window
        starts_at = now + (request.not_before or 0.0)
        core.search = Search(
            request=request,
            started=now,
            window=window,
            window_end=max(now + window, starts_at),
            starts_at=starts_at,
            deadline=request.deadline,
            regroup=self._survivors,
            regroup_until=now + core.request_timeout,
        )
        self._survivors = frozenset()
        core.view.departed.clear()
        core.view.forget_strangers(now, _FORGET_AFTER)
        core.bits = request.bits
        core.attempt += 1
        core.move(Cause.LOOK, now)
        core.announce(now)

    def _measure_interval(self, now: float) -> None:
        """Moving average of the time from step to step; a retry is no step of its own."""
        if not self._is_retry:
            if self._started is not None:
                interval = now - self._started
                before = interval if self._interval is None else self._interval
                self._interval = before + _SMOOTHING * (interval - before)
            self._started = now
        self._is_retry = False
        if self._interval is not None and self._started is not None:
            self._core.due_at = self._started + self._interval

    def _on_cancel(self, _event: Cancel, now: float) -> None:
        core = self._core
        if core.state.looks:
            self._stop_looking("it stopped looking", now)
        elif core.state is State.IN_ROUND and core.group is not None:
            self._step_back(core.group, "it cancelled its step", now)
            bits = core.group.bits
            self._on_round_finished(RoundFinished(bits, ok=True), now)

    def _step_back(self, group: Group, reason: str, now: float) -> None:
        own = group.member(self._core.me).nonce
        for member in group.members:
            if member.peer_id != self._core.me:
                self._core.send(member.peer_id, Leave(nonce=own, reason=reason), now)

    def _on_round_finished(self, event: RoundFinished, now: float) -> None:
        core, group = self._core, self._core.group
        if core.state is not State.IN_ROUND or group is None:
            raise LocalProtocolError(f"a round finished in state {core.state.value}")
        for peer in event.failed:
            core.view.exclude(peer, "failed in the last round", silent=True)
        if not event.ok:
            others = {member.peer_id for member in group.members} - event.failed - {core.me}
            self._survivors, self._is_retry = frozenset(others), True
        core.group, core.bits = None, event.bits
        core.move(Cause.FINISHED, now)
        core.announce(now)

    def _on_bits(self, event: BitsChanged, now: float) -> None:
        if self._core.state.looks:
            raise LocalProtocolError("group bits changed during a search")
        if event.bits != self._core.bits:
            self._core.bits = event.bits
            self._core.announce(now)

    def _on_close(self, _event: Close, now: float) -> None:
        core = self._core
        if core.state.looks:
            self._joiner.leave("it is closing", now)
            self._leader.dismiss("closing", "it is closing", now)
        elif core.state is State.IN_ROUND and core.group is not None:
            self._step_back(core.group, "it is closing", now)
        core.move(Cause.CLOSE, now)
        core.search = core.group = None
        self._alarm = None
        core.effects.append(Withdraw())

    def _fail(self, now: float) -> None:
        core, search = self._core, self._core.looking
        seen = self.seen(now)
        self._stop_looking("it ran out of time", now)
        core.effects.append(Failed(self._failure(search, now), seen))

    def _failure(self, search: Search, now: float) -> str:
        core, settings = self._core, self._core.settings
        others = list(core.view.bucket(core.bits, now))
        bucket = f" and group bits {core.bits!r}" if core.bits else ""
        message = (
            f"no group of at least {settings.min_group_size} within {now - search.started:.1f} s"
            f" for prefix {settings.prefix!r}{bucket}"
        )
        if settings.role is Role.CLIENT and not any(known.presence.role.leads for _, known in others):
            return f"{message}: clients cannot lead, and no node or auxiliary peer was there"
        return message if core.view.peers or core.view.departed else f"{message}: nobody else was seen"

    def _stop_looking(self, reason: str, now: float) -> None:
        core = self._core
        self._joiner.leave(reason, now)
        self._leader.dismiss("not-looking", reason, now)
        self._leader.waiting.rest()
        core.move(Cause.STOP, now, reason)
        core.search = core.follows = None
        core.announce(now)

    # ---- the directory and the network

    def _on_presence(self, event: PresenceSeen, now: float) -> None:
        if event.peer == self._core.me:
            return
        self._core.view.record(event.peer, event.presence, event.age, now)
        if event.presence.phase is not Phase.LOOKING and self._core.state is State.FOLLOWING:
            self._joiner.ask_again(event.peer, now)

    def _on_gone(self, event: PresenceGone, now: float) -> None:
        linked = event.peer == self._core.follows or event.peer in self._leader.followers
        self._core.view.gone(event.peer, now, keep=linked)

    def _on_failed(self, event: PeerFailed, now: float) -> None:
        core = self._core
        bond = self._joiner.bond
        self._leader.lost(event.peer)
        core.view.exclude(event.peer, event.reason, silent=True)
        if core.search is not None:
            core.search.refusals[event.peer] = event.reason
        if bond is not None and bond.leader == event.peer:
            self._joiner.part(event.reason, now, silent=True, dead=True)

    def _on_link_lost(self, event: LinkLost, now: float) -> None:
        self._joiner.ask_again(event.peer, now)
        if event.peer in self._leader.followers and self._leader.followers[event.peer].role.leads:
            self._core.send(event.peer, Probe(), now)

    def _on_begin_seen(self, event: BeginSeen, now: float) -> None:
        self._on_begin(event.signed, None, now)

    def _on_tick(self, _event: Tick, _now: float) -> None:
        """The rules are applied after every event."""

    def _on_message(self, event: MessageReceived, now: float) -> None:
        core, peer, message = self._core, event.peer, event.message
        core.note(now, f"from {peer.short}: {type(message).__name__}")
        core.view.word(peer, event.presence, now)
        if core.state.looks and event.presence.bits == core.bits and core.view.incompatibility(event.presence) is None:
            core.view.hearsay(getattr(message, "candidates", ()), core.bits, core.me, now)
        match message:
            case Join():
                self._leader.on_join(peer, event.presence, message, now)
            case Renew():
                self._leader.on_renew(peer, message, now)
            case Accepted():
                self._joiner.on_accepted(peer, message, now, self._leader.hand_over)
            case Redirect():
                self._joiner.on_redirect(peer, message, now)
            case Rejected():
                self._joiner.on_rejected(peer, message, now)
            case Released():
                self._joiner.on_released(peer, message, now)
            case Leave():
                self._on_leave(peer, message)
            case Begin():
                self._on_begin(message.signed, peer, now)
            case Refuse():
                self._on_refuse(peer, message)
            case Probe():
                core.send(peer, Alive(), now)
            case Alive():
                pass

    def _on_leave(self, peer: PeerId, message: Leave) -> None:
        self._leader.on_leave(peer, message.nonce)
        group = self._core.group
        if group is not None and peer in group and group.member(peer).nonce == message.nonce:
            self._lose(group, peer, message.reason)

    def _on_refuse(self, peer: PeerId, message: Refuse) -> None:
        group = self._core.group
        if group is not None and group.group_id == message.group_id and peer in group:
            self._lose(group, peer, message.reason)

    def _lose(self, group: Group, peer: PeerId, reason: str) -> None:
        """Say once that a member takes no part."""
        if self._lost[0] is not group:
            self._lost = (group, set())
        if peer not in self._lost[1]:
            self._lost[1].add(peer)
            self._core.effects.append(MemberLost(group.group_id, peer, reason))

    def _let_followers_go(self, leader: PeerId, now: float) -> None:
        if self._core.view.is_excluded(leader, now):
            self._leader.dismiss("unknown", "the leader's own group stands", now)
        else:
            self._leader.hand_over(leader, now)

    def _on_begin(self, signed: bytes, sender: PeerId | None, now: float) -> None:
        try:
            self._joiner.obey(signed, sender, now, self._let_followers_go)
        except RemoteProtocolError as error:
            if sender is not None:
                self._on_failed(PeerFailed(sender, f"sent a bad begin: {error}"), now)

    # ---- for tests

    def validate(self) -> None:
        """Raise `LocalProtocolError` if the parts of the machine contradict each other."""
        core, bond, followers = self._core, self._joiner.bond, self._leader.followers
        target = core.settings.target_group_size
        checks = {
            "a search is held exactly while looking": core.state.looks == (core.search is not None),
            "a group is held exactly while in a round": (core.state is State.IN_ROUND) == (core.group is not None),
            "a bond is held exactly while joining or following": (bond is not None)
            == (core.state in (State.JOINING, State.FOLLOWING)),
            "followers only while leading or joining": not followers or core.state in (State.LEADING, State.JOINING),
            "a client has no followers": not followers or core.settings.role.leads,
            "followers within the target": target is None or len(followers) < max(target, 2),
            "follows whom it asked": bond is None or core.follows == bond.leader,
            "joins only smaller keys": bond is None
            or not core.settings.role.leads
            or order_key(core.bits, bond.leader) < order_key(core.bits, core.me),
            "leads only larger keys": all(
                not follower.role.leads or order_key(core.bits, peer) > order_key(core.bits, core.me)
                for peer, follower in followers.items()
            ),
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise LocalProtocolError(
                f"matchmaking of {core.me.short} is inconsistent: {broken}\n" + "\n".join(self.story()[-20:])
            )

    _HANDLERS: Final[dict[type, Callable[[Any, Any, float], None]]] = {
        Look: _on_look,
        Cancel: _on_cancel,
        RoundFinished: _on_round_finished,
        BitsChanged: _on_bits,
        Close: _on_close,
        PresenceSeen: _on_presence,
        PresenceGone: _on_gone,
        MessageReceived: _on_message,
        PeerFailed: _on_failed,
        LinkLost: _on_link_lost,
        BeginSeen: _on_begin_seen,
        Tick: _on_tick,
    }
