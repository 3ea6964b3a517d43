"""What the two sides of the matchmaking machine, joining and leading, share: state, view, search, effects. No I/O."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from swarmavg.errors import LocalProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking_begin import Signer
from swarmavg.protocol.matchmaking_events import Assembled, LookRequest, MatchEffect, MatchSettings, Publish, Send
from swarmavg.protocol.matchmaking_messages import Candidate, MatchMessage
from swarmavg.protocol.matchmaking_presence import INCARNATION_BYTES, Phase, Presence
from swarmavg.protocol.matchmaking_states import TRANSITIONS, Cause, State
from swarmavg.protocol.matchmaking_view import Known, View
from swarmavg.protocol.ordering import Deal, deal

PlanHash: TypeAlias = Callable[[Sequence[Member]], bytes]
"""The hash of the plan for these members, in order. Raises `ValueError` or `SwarmError` where there is no plan."""

MAX_MISSES = 3
"""Groups that a peer may let pass, although expected, before nobody waits for it."""
_STORY = 400


@dataclass(slots=True, kw_only=True)
class Search:
    """One look, from command to group."""

    request: LookRequest
    started: float
    window: float
    window_end: float
    starts_at: float
    """Not before this moment."""
    deadline: float
    regroup: frozenset[PeerId] = frozenset()
    """Survivors of the last, failed round, waited for until `regroup_until`."""
    regroup_until: float = 0.0
    redirects: int = 0
    refusals: dict[PeerId, str] = field(default_factory=dict)

    def patience(self, request_timeout: float) -> float:
        """The moment by which the begin should be on its way, a little before the deadline."""
        return self.deadline - min(request_timeout / 3, (self.deadline - self.started) / 10)


@dataclass(slots=True, kw_only=True)
class Core:
    """Shared by `Matchmaking`, `Joiner` and `Leader`; each of them changes only what is its own."""

    me: PeerId
    settings: MatchSettings
    signer: Signer
    plan_hash: PlanHash
    rng: random.Random
    bits: str
    state: State = State.IDLE
    search: Search | None = None
    group: Group | None = None
    follows: PeerId | None = None
    effects: list[MatchEffect] = field(default_factory=list)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=_STORY))
    serial: int = 0
    attempt: int = 0
    due_at: float | None = None
    """When the next step is expected, while idle or in a round."""
    view: View = field(init=False)
    incarnation: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.settings.config)
        self.incarnation = self.rng.randbytes(INCARNATION_BYTES)

    @property
    def looking(self) -> Search:
        """The search in progress."""
        if self.search is None:
            raise LocalProtocolError(f"nothing is looked for in state {self.state.value}")
        return self.search

    @property
    def request_timeout(self) -> float:
        return self.settings.request_timeout

    def move(self, cause: Cause, now: float, why: str = "") -> None:
        after = TRANSITIONS.get((self.state, cause))
        if after is None:
            raise LocalProtocolError(f"{cause.name} is not possible in state {self.state.value}")
        self.note(now, f"{self.state.value} -> {after.value}: {why or cause.value}")
        self.state = after

    def note(self, now: float, text: str) -> None:
        self.story.append(f"{now:.3f} {text}")

    def presence(self, now: float) -> Presence:
        """The own presence, as of now."""
        phase = Phase.LOOKING if self.state.looks else Phase.IN_ROUND if self.state is State.IN_ROUND else Phase.IDLE
        due_at = self.due_at
        if self.search is not None and phase is Phase.LOOKING:
            due_at = self.search.starts_at if self.search.starts_at > now else None
        return Presence(
            role=self.settings.role,
            phase=phase,
            bits=self.bits,
            config_hash=self.view.config_hash,
            config_digests=self.settings.config.digests,
            attempt=self.attempt,
            due_in=None if due_at is None else max(0.0, due_at - now),
            incarnation=self.incarnation,
            serial=self.serial,
            follows=self.follows if phase is Phase.LOOKING else None,
        )

    def announce(self, now: float) -> None:
        """Something about oneself changed: tell everybody."""
        self.serial += 1
        self.effects.append(Publish(replace(self.presence(now), follows=None)))

    def send(self, peer: PeerId, message: MatchMessage, now: float) -> None:
        self.note(now, f"to {peer.short}: {type(message).__name__}")
        self.effects.append(Send(peer, self.presence(now), message))

    def candidates(self, now: float) -> tuple[Candidate, ...]:
        return self.view.candidates(self.bits, now) if self.search is not None else ()

    def is_ready(self, known: Known) -> bool:
        """Whether a looking peer may begin within our window."""
        return known.due_at is None or known.due_at <= self.looking.window_end

    def deal(self, now: float) -> Deal:
        """Who leads whom, among those who look now as far as is known, oneself included."""
        looking: dict[PeerId, Role] = {
            peer: known.presence.role
            for peer, known in self.view.bucket(self.bits, now)
            if known.presence.phase is Phase.LOOKING and self.is_ready(known)
        }
        looking[self.me] = self.settings.role
        return deal(looking, self.bits, self.settings.target_group_size, self.settings.min_group_size)

    def assemble(self, group: Group, cause: Cause, now: float) -> None:
        """The group stands: nothing else is looked for."""
        self._count_misses(group, now)
        self.move(cause, now, f"{cause.value}, {len(group.members)} members")
        self.search, self.follows, self.group = None, None, group
        self.bits = group.next_bits(self.me, self.settings.target_group_size)
        self.announce(now)
        self.effects.append(Assembled(group))

    def _count_misses(self, group: Group, now: float) -> None:
        for peer, known in self.view.bucket(self.bits, now):
            if peer not in group and known.presence.phase is not Phase.LOOKING and self.is_ready(known):
                known.misses += 1
