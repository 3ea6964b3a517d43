"""The members of a simulated round and their clock, without anything between them: the ground floor of `round_world`.

After every event the machine concerned validates itself.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round import Round
from swarmavg.protocol.round_control import Fencing, LinkId
from swarmavg.protocol.round_events import (
    CommitBegun,
    CommitEnded,
    Drop,
    HeldUp,
    Jobs,
    LeaveRound,
    Open,
    RoundEvent,
    RoundSetting,
    Send,
    Sever,
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


class MembersWorld:
    """The clock and the members. What lies between them is made by the classes derived from this one."""

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
            heard=lambda other: self.hears(me, other),
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
                    self.send(actor, effect)
                case Open():
                    self.open_to(actor, effect.member)
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
        self.close(actor)
        if actor.machine.state in (RoundState.FENCED, RoundState.LEFT):
            self.end(actor)
        else:
            self.at(self.now + REQUEST_TIMEOUT, actor, lambda: self.end(actor))

    # ---- what lies between the members

    def hears(self, me: int, other: int) -> bool:
        """Whether something has come from the other one lately."""
        raise NotImplementedError

    def send(self, actor: Actor, effect: Send) -> None:
        """A control message is to be sent."""

    def open_to(self, actor: Actor, other: int) -> None:
        """A control channel is wanted."""

    def close(self, actor: Actor) -> None:
        """The round is over for a member: it ends its control channels."""

    def end(self, actor: Actor) -> None:
        """A member forgets the round."""
        actor.gone = True

    def drop(self, actor: Actor, effect: Drop) -> None:
        """A member ends its data channels with another one."""

    def sever(self, actor: Actor, link: LinkId) -> None:
        """A member ends one data channel."""

    def take_up(self, actor: Actor, effect: Jobs) -> None:
        """A member begins the jobs of a term."""

    def moved(self, actor: Actor) -> None:
        """Something has changed at a member."""

    def check_agreement(self) -> None:
        """A member has committed."""

    # ---- faults

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

    def leave(self, me: int) -> None:
        actor = self.actors[me]
        if actor.running and not actor.machine.state.over:
            self.give(actor, LeaveRound("it was told to"))

    # ---- looking

    def story(self) -> str:
        """All machines' stories, one after another."""
        return "\n".join(
            f"-- m{actor.me} ({actor.role}{'' if actor.alive else ', dead'}, {actor.machine.state.value}, "
            f"holds {actor.holdings.bits:b}, live {sorted(actor.machine.live)})\n" + "\n".join(actor.machine.story())
            for actor in self.actors
        )
