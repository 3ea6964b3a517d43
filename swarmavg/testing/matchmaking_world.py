"""Matchmaking machines over a simulated message network: no tasks, no sockets, a clock of its own.

For tests of the protocol alone. Messages are encoded and decoded on their way, may be delayed, lost and reordered; peers may
die at any moment. After every event the invariants of matchmaking are checked.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking import Matchmaking
from swarmavg.protocol.matchmaking_begin import Signer
from swarmavg.protocol.matchmaking_events import (
    Assembled,
    Failed,
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
    Publish,
    Send,
    Tick,
    Withdraw,
)
from swarmavg.protocol.matchmaking_messages import MatchMessage, decode_message, encode_message
from swarmavg.protocol.matchmaking_presence import MatchConfig, Presence, decode_presence
from swarmavg.protocol.matchmaking_states import State

CONFIG = MatchConfig((("schema", "2 tensors"), ("compression", "none"), ("target_group_size", "any")))
RECORD_TTL = 30.0
_MAX_EVENTS = 2_000_000


def fake_signer(name: bytes) -> Signer:
    """Signatures by hash: they prove nothing, but a changed byte does not fit."""

    def make(public_key: bytes, data: bytes) -> bytes:
        return hashlib.sha256(b"fake" + public_key + data).digest()

    return Signer(
        public_key=name,
        swarm_id=b"s" * 32,
        accepted_swarm_ids=(b"s" * 32,),
        sign=lambda data: make(name, data),
        verify=lambda public_key, signature, data: signature == make(public_key, data),
    )


def plan_of(members: Sequence[Member]) -> bytes:
    return hashlib.sha256(b"".join(member.peer_id.digest + member.role.value.encode() for member in members)).digest()


@dataclass(slots=True)
class Actor:
    """One simulated averager."""

    peer: PeerId
    machine: Matchmaking
    role: Role
    alive: bool = True
    published: bool = False
    groups: list[tuple[float, Group]] = field(default_factory=list)
    failures: list[tuple[float, Failed]] = field(default_factory=list)
    lost: list[MemberLost] = field(default_factory=list)
    sent: list[tuple[float, PeerId, MatchMessage]] = field(default_factory=list)
    links: set[PeerId] = field(default_factory=set)

    @property
    def group(self) -> Group:
        """The latest group."""
        return self.groups[-1][1]


class World:
    """The network, the directory, the clock. `latency` is one way, in seconds."""

    def __init__(self, seed: int = 0, *, latency: float = 0.010, directory_delay: float | None = None) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)  # noqa: S311  (reproducible, not secret)
        self.actors: dict[PeerId, Actor] = {}
        self.latency: Callable[[PeerId, PeerId], float] = lambda _a, _b: latency
        self.directory_latency: Callable[[PeerId, PeerId], float] = lambda _a, _b: (
            latency if directory_delay is None else directory_delay
        )
        self.loses: Callable[[PeerId, PeerId, MatchMessage], bool] = lambda _a, _b, _m: False
        self.dead_answer = False
        """Whether a dead peer's host refuses at once (a killed process) instead of staying silent (a cut cable)."""
        self.on_assembled: Callable[[Actor, Group], None] = lambda _actor, _group: None
        self.orders: dict[GroupId, tuple[PeerId, ...]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrivals: dict[tuple[PeerId, PeerId], float] = {}
        self.ordered = True

    # ---- building

    def add(self, role: Role = Role.NODE, *, config: MatchConfig = CONFIG, **settings: object) -> Actor:
        """A new averager, present from now on."""
        values: dict[str, object] = {
            "prefix": "run",
            "target_group_size": None,
            "min_group_size": 2,
            "request_timeout": 3.0,
            "window": 5.0,
            **settings,
        }
        bits = str(values.pop("bits", ""))
        signer = fake_signer(b"key-%d-%d" % (len(self.actors), self.rng.getrandbits(64)))
        peer = PeerId.from_public_key(signer.public_key)
        machine = Matchmaking(
            peer,
            MatchSettings(role=role, config=config, **values),  # type: ignore[arg-type]
            signer=signer,
            plan_hash=plan_of,
            rng=random.Random(self.rng.getrandbits(64)),  # noqa: S311
            bits=bits,
        )
        actor = self.actors[peer] = Actor(peer, machine, role)
        self._publish(actor, machine.presence(self.now))
        for other in list(self.actors.values()):
            if other.published and other is not actor:
                self._show(other, actor, other.machine.presence(self.now))
        return actor

    # ---- commands

    def look(self, actor: Actor, **request: object) -> None:
        self.give(actor, Look(LookRequest(**request)))  # type: ignore[arg-type]

    def give(self, actor: Actor, event: MatchEvent) -> None:
        """Deliver one event, check everything, carry out the effects."""
        if not actor.alive:
            return
        actor.machine.receive(event, self.now)
        actor.machine.validate()
        for effect in actor.machine.drain_effects():
            self._carry_out(actor, effect)
        self._check_no_circle(actor)
        deadline = actor.machine.next_deadline()
        if deadline is not None:
            if deadline <= self.now:
                raise AssertionError(f"the deadline {deadline} is not after {self.now}")
            self.at(deadline, lambda: self._tick(actor, deadline))

    def kill(self, actor: Actor) -> None:
        """The peer stops, saying nothing; its record stays for the time to live."""
        actor.alive = False
        self.at(self.now + RECORD_TTL, lambda: self._hide(actor))

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), action))

    def run(self, until: float) -> None:
        """Let virtual time pass."""
        for _ in range(_MAX_EVENTS):
            if not self._queue or self._queue[0][0] > until:
                self.now = max(self.now, until)
                return
            when, _number, action = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            action()
        raise AssertionError("the simulation does not come to rest")

    # ---- effects

    def _carry_out(self, actor: Actor, effect: MatchEffect) -> None:
        match effect:
            case Send():
                self._send(actor, effect)
            case Publish():
                self._publish(actor, effect.presence)
            case Withdraw():
                self._hide(actor)
            case Assembled():
                self._check_order(effect.group)
                actor.groups.append((self.now, effect.group))
                self.on_assembled(actor, effect.group)
            case Failed():
                actor.failures.append((self.now, effect))
            case MemberLost():
                actor.lost.append(effect)

    def _send(self, actor: Actor, effect: Send) -> None:
        target = self.actors[effect.peer]
        actor.sent.append((self.now, effect.peer, effect.message))
        if self.loses(actor.peer, target.peer, effect.message):
            return
        if target.role is Role.CLIENT and target.peer not in actor.links:
            self._fail(actor, target.peer, "it accepts no connections")
            return
        target.links.add(actor.peer)
        arrival = self.now + self.latency(actor.peer, target.peer)
        if self.ordered:
            arrival = max(arrival, self._arrivals.get((actor.peer, target.peer), 0.0))
            self._arrivals[actor.peer, target.peer] = arrival
        header, payload = encode_message(effect.presence, effect.message)
        self.at(arrival, lambda: self._deliver(actor, target, header, payload))

    def _deliver(self, actor: Actor, target: Actor, header: bytes, payload: bytes) -> None:
        if target.alive:
            presence, message = decode_message(header, payload)
            self.give(target, MessageReceived(actor.peer, presence, message))
        elif self.dead_answer:
            self._fail(actor, target.peer, "could not be reached: connection refused")

    def _fail(self, actor: Actor, target: PeerId, reason: str) -> None:
        delay = self.latency(target, actor.peer)
        self.at(self.now + delay, lambda: self.give(actor, PeerFailed(target, reason)))

    def _publish(self, actor: Actor, presence: Presence) -> None:
        actor.published = True
        presence = decode_presence(presence.encode())
        for other in self.actors.values():
            if other is not actor:
                self._show(actor, other, presence)

    def _show(self, owner: Actor, reader: Actor, presence: Presence) -> None:
        delay = self.directory_latency(owner.peer, reader.peer)
        seen = PresenceSeen(owner.peer, presence, delay)
        self.at(self.now + delay, lambda: self.give(reader, seen))

    def _hide(self, actor: Actor) -> None:
        actor.published = False
        for other in self.actors.values():
            if other is not actor:
                delay = self.directory_latency(actor.peer, other.peer)
                self.at(self.now + delay, lambda other=other: self.give(other, PresenceGone(actor.peer)))  # type: ignore[misc]

    def _tick(self, actor: Actor, deadline: float) -> None:
        if actor.machine.next_deadline() == deadline:
            self.give(actor, Tick())

    # ---- invariants

    def _check_order(self, group: Group) -> None:
        order = tuple(member.peer_id for member in group.members)
        if self.orders.setdefault(group.group_id, order) != order:
            raise AssertionError(f"two orders for {group.group_id}")

    def _check_no_circle(self, actor: Actor) -> None:
        seen = [actor.peer]
        current = actor
        while current.alive and current.machine.state in (State.JOINING, State.FOLLOWING):
            leader = current.machine.follows
            if leader is None:
                raise AssertionError(f"{current.peer} follows nobody in state {current.machine.state}")
            if leader in seen:
                raise AssertionError(f"a circle of waiting: {seen}")
            seen.append(leader)
            current = self.actors[leader]

    def check_nonces(self) -> None:
        """Nobody is in two groups: no nonce was named by two begins, and every member's group names it once."""
        named: dict[bytes, GroupId] = {}
        for actor in self.actors.values():
            for _, group in actor.groups:
                if actor.peer not in group:
                    raise AssertionError(f"{actor.peer} assembled a group without itself")
                for member in group.members:
                    if named.setdefault(member.nonce, group.group_id) != group.group_id:
                        raise AssertionError(f"{member.peer_id} is in two groups by one nonce")
