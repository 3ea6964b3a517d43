"""The members of a simulated round, their clock and their control channels. `round_world` adds the data channels.

Control messages are encoded and decoded on their way and keep their order on a channel; what happens on different channels
happens in any order. After every event the machine concerned validates itself.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round import Round
from swarmavg.protocol.round_control import ControlMessage, Fencing, LinkId, Term, decode_control, encode_control
from swarmavg.protocol.round_events import (
    CommitBegun,
    CommitEnded,
    ControlLost,
    ControlMissing,
    ControlUp,
    Drop,
    HeldUp,
    Jobs,
    LeaveRound,
    LinkFailed,
    Open,
    RoundEvent,
    RoundSetting,
    MessageCame,
    Send,
    Sever,
    TermSeen,
    Tick,
)
from swarmavg.protocol.round_states import RoundState
from swarmavg.testing.round_world_data import Holdings

PATIENCE: Final = 4.0
REQUEST_TIMEOUT: Final = 1.0
LATENCY: Final = 0.02
_MAX_EVENTS: Final = 200_000


class Why(NamedTuple):
    """How a channel ends for one of its ends."""

    code: ExclusionCode
    detail: str
    fenced_by: Fencing | None = None
    blameless: bool = False


@dataclass(eq=False)
class Control:
    """A control channel between two members."""

    ends: frozenset[int]
    broken: bool = False
    lossy: bool = False
    """Whether what was under way when it broke is lost."""
    closed_by: set[int] = field(default_factory=set)
    last: dict[int, float] = field(default_factory=dict)
    """By receiver: when the latest message arrives."""
    heard: dict[int, float] = field(default_factory=dict)
    """By receiver: when the other end could last be heard."""
    held: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    """Receivers and messages, while the two are cut off from each other."""


class Actor:
    """One simulated member."""

    def __init__(self, me: int, role: str, machine: Round, holdings: Holdings) -> None:
        self.me = me
        self.role = role
        self.machine = machine
        self.holdings = holdings
        self.alive = True
        self.frozen = False
        self.backlog: list[Callable[[], None]] = []
        self.links: dict[int, list[Control]] = {}
        """By the other's position; two that dial each other at the same time have two."""
        self.closing = False
        self.gone = False
        """It answers no more for this round."""
        self.commit_due = False
        self.ended: float | None = None

    @property
    def receives(self) -> bool:
        return self.role != "a"

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen

    def all_links(self) -> list[tuple[int, Control]]:
        return [(other, link) for other, links in sorted(self.links.items()) for link in links]


class ControlWorld:
    """The clock, the members and their control channels. `RoundWorld` adds the data channels."""

    def __init__(self, seed: int, roles: str, owners: Sequence[int], *, leader: int = 0) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)  # noqa: S311  (reproducible, not secret)
        self.events = 0
        self.on_event: Callable[[int], None] = lambda _number: None
        """Called with the number of each event, before it happens."""
        self.roles = roles
        self.owners = tuple(owners)
        self._queue: list[tuple[float, int, Actor | None, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[tuple[int, int], list[tuple[bytes, bytes]]] = {}
        self._dialling: set[tuple[int, int]] = set()
        self._cuts: dict[frozenset[int], int] = {}
        self._controls: list[Control] = []
        self._salt = self.rng.randbytes(16)
        self.actors = [self._actor(me, leader) for me in range(len(roles))]

    def _actor(self, me: int, leader: int) -> Actor:
        holdings = Holdings()
        setting = RoundSetting(
            me=me,
            names=[f"m{position}" for position in range(len(self.roles))],
            salt=self._salt,
            leader=leader,
            serves=frozenset(i for i, role in enumerate(self.roles) if role != "c"),
            receives=frozenset(i for i, role in enumerate(self.roles) if role != "a"),
            owners=self.owners,
            request_timeout=REQUEST_TIMEOUT,
            patience=PATIENCE,
            holdings=lambda: holdings.bits,
            heard=lambda other: self._hears(me, other),
        )
        return Actor(me, self.roles[me], Round(setting), holdings)

    # ---- time

    def at(self, when: float, actor: Actor | None, action: Callable[[], None]) -> None:
        """`actor`: who does it; not if it is dead, and not before it runs again if it stands still."""
        heapq.heappush(self._queue, (when, next(self._numbers), actor, action))

    def soon(self, actor: Actor | None, action: Callable[[], None]) -> None:
        self.at(self.now + self.delay(), actor, action)

    def delay(self) -> float:
        """Mostly short; never so long that an answer does not come in time."""
        return self.rng.uniform(0.2, 1.0) * LATENCY * (12 if self.rng.random() < 0.05 else 1)

    def run(self, until: float) -> None:
        """Let virtual time pass."""
        for _ in range(_MAX_EVENTS):
            if not self._queue or self._queue[0][0] > until:
                self.now = max(self.now, until)
                return
            when, _, actor, action = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            self.events += 1
            self.on_event(self.events)
            if actor is None or actor.running:
                action()
            elif actor.alive:
                actor.backlog.append(action)
        raise AssertionError("the simulation does not come to rest\n" + self.story())

    # ---- machines

    def give(self, actor: Actor, event: RoundEvent) -> None:
        """Deliver one event and carry out what follows."""
        actor.machine.receive(event, self.now)
        deadline = actor.machine.next_deadline()
        if deadline is not None and deadline <= self.now:
            raise AssertionError(f"the deadline {deadline} of m{actor.me} is not after {self.now}")
        self.settle(actor)

    def settle(self, actor: Actor) -> None:
        """Carry out the effects of a machine."""
        machine = actor.machine
        machine.validate()
        for effect in machine.drain_effects():
            match effect:
                case Send():
                    self._send(actor, effect.to, effect.term, effect.message)
                case Open():
                    self._open(actor, effect.member)
                case Drop():
                    self.drop(actor, effect)
                case Sever():
                    self.sever(actor, effect.link)
                case Jobs():
                    self.take_up(actor, effect)
        deadline = machine.next_deadline()
        if deadline is not None:
            self.at(deadline, actor, lambda: self._tick(actor))
        if machine.may_commit and not actor.commit_due:
            actor.commit_due = True
            self.soon(actor, lambda: self._commit(actor))
        if machine.state.over and not actor.closing:
            self._close(actor)
        self.moved(actor)

    def _tick(self, actor: Actor) -> None:
        deadline = actor.machine.next_deadline()
        if deadline is not None and deadline <= self.now:
            self.give(actor, Tick())

    def _commit(self, actor: Actor) -> None:
        actor.commit_due = False
        if not actor.machine.may_commit:
            return
        self.give(actor, CommitBegun())
        actor.holdings.committed = dict(actor.holdings.results)
        self.check_agreement()
        self.soon(actor, lambda: self._committed(actor))

    def _committed(self, actor: Actor) -> None:
        if actor.machine.state.committed:
            self.give(actor, CommitEnded())

    def _close(self, actor: Actor) -> None:
        """The round is over for this member: it ends its channels, and after a while answers no more."""
        actor.closing = True
        actor.ended = self.now
        for other, link in actor.all_links():
            link.closed_by.add(actor.me)
            self._later(link, other, Why(ExclusionCode.CANCELLED, "it ended its control channel"))
        if actor.machine.state in (RoundState.FENCED, RoundState.LEFT):
            self.end(actor)
        else:
            self.at(self.now + REQUEST_TIMEOUT, actor, lambda: self.end(actor))

    def end(self, actor: Actor) -> None:
        """It forgets the round."""
        actor.gone = True
        for _, link in actor.all_links():
            self._break(link)
        actor.links.clear()

    # ---- what `RoundWorld` does

    def drop(self, actor: Actor, effect: Drop) -> None: ...

    def sever(self, actor: Actor, link: LinkId) -> None: ...

    def take_up(self, actor: Actor, effect: Jobs) -> None: ...

    def moved(self, actor: Actor) -> None: ...

    def check_agreement(self) -> None: ...

    # ---- faults

    def kill(self, me: int, *, lossy: bool = False) -> None:
        """The process dies; its host answers."""
        actor = self.actors[me]
        actor.alive = False
        for link in [link for link in self._controls if me in link.ends and not link.broken]:
            link.lossy |= lossy
            self._break(link)

    def freeze(self, me: int, seconds: float) -> None:
        """Nothing of it runs for so long."""
        actor = self.actors[me]
        if not actor.running:
            return
        actor.frozen = True
        self.at(self.now + seconds, None, lambda: self._thaw(actor, seconds))

    def _thaw(self, actor: Actor, seconds: float) -> None:
        actor.frozen = False
        if not actor.alive:
            return
        self.give(actor, HeldUp(seconds))
        backlog, actor.backlog = actor.backlog, []
        for action in backlog:
            self.at(self.now, actor, action)
        self.moved(actor)

    def cut(self, a: int, b: int, seconds: float | None = None) -> None:
        """Nothing passes between two members, and neither is told."""
        pair = frozenset({a, b})
        serial = self._cuts[pair] = next(self._numbers)
        if seconds is not None:
            self.at(self.now + seconds, None, lambda: self._heal(pair, serial))

    def _heal(self, pair: frozenset[int], serial: int) -> None:
        if self._cuts.get(pair) != serial:
            return
        del self._cuts[pair]
        for link in self._controls:
            held, link.held = link.held, []
            for to, header, payload in held:
                self._under_way(link, to, header, payload)
        for member in sorted(pair):
            self.moved(self.actors[member])

    def is_cut(self, a: int, b: int) -> bool:
        return frozenset({a, b}) in self._cuts

    def break_control(self, a: int, b: int) -> None:
        """The control channel between two members is lost."""
        for link in self.actors[a].links.get(b, ()):
            self._break(link)

    def leave(self, me: int) -> None:
        actor = self.actors[me]
        if actor.running and not actor.machine.state.over:
            self.give(actor, LeaveRound("it was told to"))

    # ---- control channels

    def _hears(self, me: int, other: int) -> bool:
        actor = self.actors[other]
        return not self.is_cut(me, other) and actor.running and not actor.gone and bool(self.actors[me].links.get(other))

    def _send(self, actor: Actor, to: int, term: Term, message: ControlMessage) -> None:
        encoded = encode_control(term, message)
        links = actor.links.get(to)
        if not links:
            self._waiting.setdefault((actor.me, to), []).append(encoded)
            self._open(actor, to)
        elif actor.me not in links[-1].closed_by and not links[-1].broken:
            self._under_way(links[-1], to, *encoded)

    def _under_way(self, link: Control, to: int, header: bytes, payload: bytes) -> None:
        arrival = link.last[to] = max(link.last.get(to, 0.0), self.now + self.delay())
        self.at(arrival, self.actors[to], lambda: self._arrive(link, to, header, payload))

    def _arrive(self, link: Control, to: int, header: bytes, payload: bytes) -> None:
        (sender,) = link.ends - {to}
        actor = self.actors[to]
        if link.lossy or link not in actor.links.get(sender, ()):
            return
        if self.is_cut(sender, to):
            link.held.append((to, header, payload))
            return
        term, message = decode_control(header, memoryview(payload))
        try:
            actor.machine.receive(MessageCame(sender, term, message), self.now)
        except RemoteProtocolError as error:
            raise AssertionError(f"an honest member is told that it broke the rules: {error}\n{self.story()}") from error
        self.settle(actor)

    def _open(self, actor: Actor, other: int) -> None:
        if actor.closing or actor.links.get(other) or (actor.me, other) in self._dialling or self.roles[other] == "c":
            return
        self._dialling.add((actor.me, other))
        self.soon(actor, lambda: self._dialled(actor, self.actors[other], patient=True))

    def _dialled(self, actor: Actor, other: Actor, *, patient: bool) -> None:
        if actor.closing:
            self._dialling.discard((actor.me, other.me))
            return
        if other.alive and (self.is_cut(actor.me, other.me) or other.frozen):
            if patient:
                self.at(self.now + 2 * REQUEST_TIMEOUT, actor, lambda: self._dialled(actor, other, patient=False))
                return
            why: Why | None = Why(ExclusionCode.UNREACHABLE, "no answer")
        elif not other.alive:
            why = Why(ExclusionCode.UNREACHABLE, "connection refused")
        else:
            why = self.refusal(actor, other)
        self._dialling.discard((actor.me, other.me))
        if why is None:
            self._connect(actor, other)
        elif not actor.links.get(other.me):
            self._waiting.pop((actor.me, other.me), None)
            self.give(actor, ControlLost(other.me, why.code, why.detail, why.fenced_by))

    def refusal(self, actor: Actor, other: Actor) -> Why | None:
        """Why `other` takes no channel from `actor`, if so."""
        if actor.me in other.machine.out:
            return Why(ExclusionCode.FENCED, "the round goes on without you", other.machine.fencing)
        if other.gone:
            return Why(ExclusionCode.CANCELLED, "the round is over")
        return None

    def _connect(self, actor: Actor, other: Actor) -> None:
        link = Control(frozenset({actor.me, other.me}))
        self._controls.append(link)
        arrival = link.last[other.me] = self.now + self.delay()
        self.at(arrival, other, lambda: self._accept(link, other, actor))
        self._stands(link, actor, other.me)

    def _accept(self, link: Control, other: Actor, actor: Actor) -> None:
        why = self.refusal(actor, other)
        if why is None:
            if not link.broken:
                self._stands(link, other, actor.me)
        else:
            link.broken = link.lossy = True
            self._later(link, actor.me, why)

    def _stands(self, link: Control, actor: Actor, other: int) -> None:
        actor.links.setdefault(other, []).append(link)
        link.heard[actor.me] = self.now
        for encoded in self._waiting.pop((actor.me, other), []):
            self._under_way(link, other, *encoded)
        self.give(actor, ControlUp(other))

    def judge(self, actor: Actor) -> None:
        """Give up control channels on which nothing has come for the patience of this member."""
        for other, link in actor.all_links():
            if not link.broken and self.actors[other].running and not self.is_cut(actor.me, other):
                link.heard[actor.me] = self.now
            elif self.now - link.heard[actor.me] > PATIENCE and not actor.closing:
                link.broken = True
                self._lost(link, actor, Why(ExclusionCode.SILENT, "no byte"))
                self._later(link, other, Why(ExclusionCode.CONNECTION_LOST, "the other side gave the channel up"))

    def forgive(self, actor: Actor, seconds: float) -> None:
        """It stood still itself: nobody is accused of that time."""
        for _, link in actor.all_links():
            link.heard[actor.me] += seconds

    def _break(self, link: Control) -> None:
        link.broken = True
        for member in sorted(link.ends):
            self._later(link, member, Why(ExclusionCode.CONNECTION_LOST, "reset"))

    def _later(self, link: Control, member: int, why: Why) -> None:
        """The end of a channel reaches one end of it, after what was sent before."""
        arrival = max(link.last.get(member, 0.0), self.now + self.delay())
        link.last[member] = arrival
        actor = self.actors[member]
        self.at(arrival, actor, lambda: self._lost(link, actor, why))

    def _lost(self, link: Control, actor: Actor, why: Why) -> None:
        (other,) = link.ends - {actor.me}
        if link not in actor.links.get(other, ()):
            return
        if why.code in (ExclusionCode.CONNECTION_LOST, ExclusionCode.CANCELLED) and self.is_cut(actor.me, other):
            return  # it does not get here; the silence will be noticed
        actor.links[other].remove(link)
        link.broken = True
        if not actor.closing and not actor.links[other]:
            self._waiting.pop((actor.me, other), None)
            self.give(actor, ControlLost(other, why.code, why.detail, why.fenced_by))

    # ---- looking

    def story(self) -> str:
        """All machines' stories, one after another."""
        return "\n".join(
            f"-- m{actor.me} ({actor.role}{'' if actor.alive else ', dead'}, {actor.machine.state.value}, "
            f"holds {actor.holdings.bits:b}, live {sorted(actor.machine.live)})\n" + "\n".join(actor.machine.story())
            for actor in self.actors
        )

    def miss(self, actor: Actor) -> None:
        """The coordinator of the first term looks whether everybody has come."""
        machine = actor.machine
        if self.now > PATIENCE and machine.coordinates and machine.term.number == 0 and not machine.state.over:
            for member in sorted(machine.unconnected()):
                self.give(actor, ControlMissing(member, "no channel from it"))

    def see_term(self, actor: Actor, sender: int, term: Term) -> None:
        if term > actor.machine.term:
            self.give(actor, TermSeen(sender, term))

    def accuse(self, actor: Actor, link: LinkId, other: int, why: Why) -> None:
        """A data channel has ended at one of its ends before its work was done."""
        if actor.closing:
            return
        if why.fenced_by is not None:
            self.give(actor, ControlLost(other, why.code, why.detail, why.fenced_by))
        elif not why.blameless:
            self.give(actor, LinkFailed(link, other, why.code, why.detail))
