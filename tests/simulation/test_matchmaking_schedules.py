"""Generated schedules: averagers come, look, die and cancel at random over networks that delay, lose and reorder messages.

The invariants of one event are checked by the world; those of a whole run here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from swarmavg.identifiers import PeerId
from swarmavg.protocol.group import Group, Role
from swarmavg.protocol.matchmaking_events import Cancel, RoundFinished
from swarmavg.protocol.matchmaking_states import State
from swarmavg.testing.matchmaking_world import Actor, World

HORIZON = 120.0
ROUNDS = 3


@dataclass
class Run:
    """What one schedule may do, and what it did."""

    seed: int
    loss: float = 0.0
    kills: int = 0
    cancels: int = 0
    unordered: bool = False
    world: World = field(init=False)
    rng: random.Random = field(init=False)
    searches: dict[PeerId, list[tuple[float, float]]] = field(default_factory=dict)
    """Start of each search and its deadline."""
    cancelled: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        world = self.world = World(self.seed)
        slowest = self.rng.choice([0.002, 0.02, 0.15])
        pairs: dict[tuple[PeerId, PeerId], float] = {}
        delays: dict[tuple[PeerId, PeerId], float] = {}
        news = self.rng.choice([0.0, 0.05, 0.5])
        world.latency = lambda a, b: self._delay(pairs, a, b, slowest)
        world.directory_latency = lambda a, b: self._delay(delays, a, b, slowest + news)
        world.loses = lambda _a, _b, _m: self.rng.random() < self.loss
        world.dead_answer = self.rng.random() < 0.5
        world.ordered = not self.unordered
        world.on_assembled = self._on_assembled
        self.window = self.rng.choice([2.0, 5.0])
        self.timeout = self.rng.choice([1.0, 1.5])
        target = self.rng.choice([None, 2, 3, 4])
        count = self.rng.randint(2, 9)
        self.actors = [self._add(target, first=index == 0) for index in range(count)]
        self.rounds = {actor.peer: 0 for actor in self.actors}

    def _delay(self, known: dict[tuple[PeerId, PeerId], float], a: PeerId, b: PeerId, slowest: float) -> float:
        base = known.setdefault((a, b), self.rng.uniform(0.1, 1.0) * slowest)
        return base * self.rng.uniform(1.0, 3.0) if self.unordered else base

    def _add(self, target: int | None, *, first: bool) -> Actor:
        role = Role.NODE if first else self.rng.choice([Role.NODE, Role.NODE, Role.NODE, Role.CLIENT, Role.AUXILIARY])
        return self.world.add(role, target_group_size=target, request_timeout=self.timeout, window=self.window)

    def go(self) -> None:
        world, rng = self.world, self.rng
        for actor in self.actors:
            self._look_later(actor, rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 4.0)]))
        for actor in rng.sample(self.actors, min(self.kills, len(self.actors) - 1)):
            world.at(rng.uniform(0.0, 8.0), lambda actor=actor: world.kill(actor))  # type: ignore[misc]
        for actor in rng.sample(self.actors, min(self.cancels, len(self.actors))):
            world.at(rng.uniform(0.0, 1.0), lambda actor=actor: self._cancel(actor))  # type: ignore[misc]
        world.run(HORIZON)
        world.check_nonces()

    def _look_later(self, actor: Actor, delay: float) -> None:
        def look() -> None:
            if actor.alive and actor.machine.state is State.IDLE:
                deadline = self.world.now + 40.0
                self.searches.setdefault(actor.peer, []).append((self.world.now, deadline))
                self.world.look(actor, deadline=deadline, gather=actor.peer.digest)

        self.world.at(self.world.now + delay, look)

    def _cancel(self, actor: Actor) -> None:
        self.cancelled.add(actor.peer)
        self.world.give(actor, Cancel())
        self._look_later(actor, self.rng.uniform(0.0, 1.0))

    def _on_assembled(self, actor: Actor, group: Group) -> None:
        def finish() -> None:
            if actor.alive and actor.machine.group is group:
                ok = self.rng.random() < 0.7
                dead = frozenset(m.peer_id for m in group.members if not self.world.actors[m.peer_id].alive)
                self.world.give(actor, RoundFinished("", ok=ok, failed=dead))
                self.rounds[actor.peer] += 1
                if self.rounds[actor.peer] < ROUNDS:
                    self._look_later(actor, self.rng.choice([0.0, 0.2, 1.0]))

        self.world.at(self.world.now + self.rng.uniform(0.1, 1.0), finish)

    # ---- what must hold in the end

    def check_everybody_ended(self) -> None:
        for actor in self.actors:
            if actor.alive:
                assert actor.machine.state in (State.IDLE, State.IN_ROUND), f"{actor.peer} hangs in {actor.machine.state}"
                for when, _ in actor.failures:
                    assert any(math.isclose(when, deadline) for _, deadline in self.searches[actor.peer])

    def check_groups_are_whole(self) -> None:
        """Without faults, everyone whom a begin names obeys it."""
        for actor in self.actors:
            for _, group in actor.groups:
                for member in group.members:
                    other = self.world.actors[member.peer_id]
                    assert any(theirs.group_id == group.group_id for _, theirs in other.groups), f"{other.peer} is a phantom"
                    assert member.gather == other.peer.digest

    def check_no_two_missed_each_other(self, patience: float) -> None:
        """Two that could form a group did not both look in vain at the same time for longer than `patience`."""
        failed = [
            (actor, when - 40.0, when)
            for actor in self.actors
            if actor.alive and actor.peer not in self.cancelled
            for when, _ in actor.failures
        ]
        for index, (one, since, until) in enumerate(failed):
            for other, since2, until2 in failed[index + 1 :]:
                overlap = min(until, until2) - max(since, since2)
                can_lead = one.role.leads or other.role.leads
                if one is not other and can_lead and overlap > patience:
                    stories = "\n".join(one.machine.story()[-80:]) + "\n--\n" + "\n".join(other.machine.story()[-80:])
                    raise AssertionError(f"seed {self.seed}: {one.peer} and {other.peer} missed each other\n{stories}")


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_without_faults(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed)
        run.go()
        run.check_everybody_ended()
        run.check_groups_are_whole()
        run.check_no_two_missed_each_other(run.window)


@pytest.mark.parametrize("first", range(1000, 1120, 20))
def test_with_peers_that_die_and_cancel(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed, kills=2, cancels=2)
        run.go()
        run.check_everybody_ended()
        run.check_no_two_missed_each_other(run.window + 3 * run.timeout)


@pytest.mark.parametrize("first", range(2000, 2120, 20))
def test_with_messages_lost_and_reordered(first: int) -> None:
    for seed in range(first, first + 20):
        run = Run(seed, loss=0.15, kills=1, cancels=1, unordered=True)
        run.go()
        run.check_everybody_ended()
        run.check_no_two_missed_each_other(3 * run.window + 3 * run.timeout)
