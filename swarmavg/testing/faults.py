"""Plans of faults, in a fluent style: what befalls which peer of a `SimulatedSwarm`, and when. A plan replays exactly.

plan = FaultPlan(seed=7).kill(2).at_part(3).freeze(1, seconds=20).after_message(5).cut(0, 1, seconds=5).at(1.5)

async with SimulatedSwarm(faults=plan) as swarm:
    ...

Peers have numbers, from 0, in the order in which the swarm makes them. Messages, parts and results are counted from 1, per
peer: ``at_part(3)`` is the moment at which it is about to send its third part.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from swarmavg.testing.fault_kinds import (
    Corrupt,
    Cut,
    Fault,
    Freeze,
    Kill,
    SkewClock,
    Slow,
    Stall,
    StepClock,
    Trigger,
    Where,
    check_peer,
)


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """What a plan did to a swarm."""

    time: float
    """Virtual seconds since the event loop's start, by the clock that nobody has touched."""
    fault: int
    """Its place in the plan, from 0."""
    action: str
    """Such as ``kill`` or ``cut``; ``end of cut`` when it is over."""
    peers: tuple[int, ...]
    text: str
    """For people: what it was, and what brought it about."""


class FaultPlan:
    """Faults and their triggers. Plans do not change: each method returns a new one, with a fault more.

    A method that names a moment belongs to the fault before it; without one, the fault happens at the start, or as soon as the
    peers concerned exist. `of` makes the messages of another peer count. ``repr(plan)`` is code that makes the same plan.

    Arguments:
        seed: of what is left to chance when the plan runs, such as which bits flip.
    """

    def __init__(self, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, got {seed!r}")  # noqa: TRY004  (one type for all bad arguments)
        self.seed = seed
        self.faults: tuple[Fault, ...] = ()
        self.triggers: tuple[Trigger | None, ...] = ()
        """One per fault; `None` = from the start."""
        self.events: list[FaultEvent] = []
        """What the latest run did, in order."""

    @classmethod
    def random(cls, seed: int, *, peers: int, faults: int = 3, seconds: float = 5.0) -> FaultPlan:
        """A plan of mixed faults, at random messages and moments within `seconds`. At least two peers stay alive and running.

        It flips no bits but such as every receiver notices: others would be an error that no protocol can see.
        """
        if isinstance(peers, bool) or not isinstance(peers, int) or peers < 2:
            raise ValueError(f"peers must be at least 2, got {peers!r}")
        if isinstance(faults, bool) or not isinstance(faults, int) or faults < 0:
            raise ValueError(f"faults must be a number of faults, at least 0, got {faults!r}")
        _check_moment("seconds", seconds)
        return _RandomPlan(cls(seed), peers, seconds).extended(faults)

    # --- faults

    def kill(self, peer: int, *, abrupt: bool = False) -> FaultPlan:
        """``kill -9``: nothing of the peer runs again. What it has sent still arrives, unless `abrupt`."""
        return self._with(Kill(peer, bool(abrupt)))

    def freeze(self, peer: int, *, seconds: float | None = None) -> FaultPlan:
        """SIGSTOP, and SIGCONT after `seconds`. Clocks go on, and what is sent to the peer waits for it."""
        return self._with(Freeze(peer, seconds))

    def cut(self, a: int, b: int, *, seconds: float | None = None) -> FaultPlan:
        """Nothing passes between two peers, either way, and neither is told. Afterwards all arrives that was sent."""
        return self._with(Cut(a, b, seconds))

    def stall(self, a: int, b: int, *, seconds: float | None = None) -> FaultPlan:
        """The link from `a` to `b` stops moving bytes but stays up; that from `b` to `a` goes on."""
        return self._with(Stall(a, b, seconds))

    def slow(self, a: int, b: int, *, bytes_per_second: float, seconds: float | None = None) -> FaultPlan:
        """The link from `a` to `b` moves so many bytes per second."""
        return self._with(Slow(a, b, seconds, bytes_per_second))

    def corrupt(self, peer: int, *, where: Where = "frame") -> FaultPlan:
        """Flip bits of the next message of a peer: of its ``"frame"``, which every receiver notices, or of its ``"header"`` or
        ``"payload"``, which may pass for another value, as nothing but TLS would tell.
        """
        return self._with(Corrupt(peer, where))

    def step_clock(self, peer: int, *, hours: float = 0, minutes: float = 0, seconds: float = 0) -> FaultPlan:
        """Set the wall clock of a peer (`time.time`) forward, or back if negative."""
        return self._with(StepClock(peer, _total(hours, minutes, seconds)))

    def skew_clock(self, peer: int, *, hours: float = 0, minutes: float = 0, seconds: float = 0) -> FaultPlan:
        """All clocks of a peer are ahead from its start, the event loop's as well. It takes no trigger."""
        return self._with(SkewClock(peer, _total(hours, minutes, seconds)))

    # --- triggers

    def at(self, seconds: float) -> FaultPlan:
        """So many virtual seconds after the swarm was entered."""
        _check_moment("seconds", seconds)
        return self._when(Trigger("at", seconds))

    def at_message(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When the peer is about to send its n-th message. If it is killed, not a byte of that leaves."""
        return self._counted("at_message", number, of)

    def before_message(self, number: int, *, of: int | None = None) -> FaultPlan:
        """Another name of `at_message`."""
        return self._counted("at_message", number, of)

    def after_message(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When its n-th message is entirely on its way. If it is killed, that still arrives."""
        return self._counted("after_message", number, of)

    def at_part(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When the peer is about to send its n-th part, to whichever reducer."""
        return self._counted("at_part", number, of)

    def after_part(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When its n-th part is on its way."""
        return self._counted("after_part", number, of)

    def at_result(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When the peer is about to send its n-th result, to whichever contributor."""
        return self._counted("at_result", number, of)

    def after_result(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When its n-th result is on its way."""
        return self._counted("after_result", number, of)

    def after_receiving(self, number: int, *, of: int | None = None) -> FaultPlan:
        """When the peer has read the whole of the n-th message that came to it, and not acted on it yet."""
        return self._counted("after_receiving", number, of)

    # --- looking

    def describe(self) -> str:
        """One line per fault: what it does, and when."""
        return "\n".join(self.describe_fault(index) for index in range(len(self.faults)))

    def describe_fault(self, index: int) -> str:
        """What one fault does, and when."""
        fault, trigger = self.faults[index], self.triggers[index]
        moment = "from the start" if trigger is None else trigger.describe(fault.peers[0])
        return f"{fault.describe()} {moment}"

    @property
    def unapplied(self) -> tuple[str, ...]:
        """Descriptions of the faults whose moment did not come in the latest run."""
        applied = {event.fault for event in self.events}
        return tuple(self.describe_fault(index) for index in range(len(self.faults)) if index not in applied)

    def clock_offset(self, peer: int) -> float:
        """Seconds by which the clocks of a peer are ahead."""
        return sum(fault.seconds for fault in self.faults if isinstance(fault, SkewClock) and fault.peer == peer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FaultPlan):
            return NotImplemented
        return (self.seed, self.faults, self.triggers) == (other.seed, other.faults, other.triggers)

    def __hash__(self) -> int:
        return hash((self.seed, self.faults, self.triggers))

    def __repr__(self) -> str:
        calls = [f"FaultPlan({self.seed})"]
        for fault, trigger in zip(self.faults, self.triggers, strict=True):
            calls += [repr(fault)] if trigger is None else [repr(fault), repr(trigger)]
        return ".".join(calls)

    # --- inside

    def _with(self, fault: Fault) -> FaultPlan:
        return self._changed((*self.faults, fault), (*self.triggers, None))

    def _counted(self, kind: str, number: int, of: int | None) -> FaultPlan:
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"number must be an integer, at least 1, got {number!r}")
        if of is not None:
            check_peer("of", of)
        return self._when(Trigger(kind, number, of))

    def _when(self, trigger: Trigger) -> FaultPlan:
        if not self.faults:
            raise ValueError(f"{trigger!r} needs a fault before it, such as kill(2)")
        if self.triggers[-1] is not None:
            raise ValueError(f"{self.faults[-1]!r} has a moment already, {self.triggers[-1]!r}, got {trigger!r}")
        if isinstance(self.faults[-1], SkewClock):
            message = f"{self.faults[-1]!r} holds from the start and takes no moment, got {trigger!r}"
            raise ValueError(message)  # noqa: TRY004  (not a matter of types)
        return self._changed(self.faults, (*self.triggers[:-1], trigger))

    def _changed(self, faults: tuple[Fault, ...], triggers: tuple[Trigger | None, ...]) -> FaultPlan:
        plan = type(self)(self.seed)
        plan.faults, plan.triggers = faults, triggers
        return plan


_MOST_MESSAGES: Final = 60
_MOST_PARTS: Final = 12


class _RandomPlan:
    """Makes up faults one after another."""

    def __init__(self, plan: FaultPlan, peers: int, seconds: float) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)  # noqa: S311  (repeatable, not secret)
        self._seconds = seconds
        self._numbers = range(peers)
        self._order = self._rng.sample(self._numbers, peers)
        self._harmed: set[int] = set()

    def extended(self, faults: int) -> FaultPlan:
        makers = [self._kill, self._freeze, self._cut, self._stall, self._slow, self._corrupt, self._clock]
        for maker in self._rng.choices(makers, [3, 3, 2, 2, 2, 1, 1], k=faults):
            maker()
        return self._plan

    def _victim(self) -> int | None:
        """One of those that may be lost: all but two, the same ones throughout."""
        candidates = self._order[2:]
        return self._rng.choice(candidates) if candidates else None

    def _kill(self) -> None:
        victim = self._victim()
        if victim is None:
            self._slow()
        else:
            self._plan = self._triggered(self._plan.kill(victim, abrupt=self._rng.random() < 0.5))

    def _freeze(self) -> None:
        victim = self._victim()
        if victim is None:
            self._slow()
        else:
            self._plan = self._triggered(self._plan.freeze(victim, seconds=self._duration()))

    def _cut(self) -> None:
        a, b = self._rng.sample(self._numbers, 2)
        self._plan = self._triggered(self._plan.cut(a, b, seconds=self._duration()))

    def _stall(self) -> None:
        a, b = self._rng.sample(self._numbers, 2)
        self._plan = self._triggered(self._plan.stall(a, b, seconds=self._duration()))

    def _slow(self) -> None:
        a, b = self._rng.sample(self._numbers, 2)
        rate = float(self._rng.choice([1_000, 10_000, 100_000]))
        self._plan = self._triggered(self._plan.slow(a, b, bytes_per_second=rate, seconds=self._duration()))

    def _corrupt(self) -> None:
        self._plan = self._triggered(self._plan.corrupt(self._rng.choice(self._numbers)))

    def _clock(self) -> None:
        peer, hours = self._rng.choice(self._numbers), self._rng.choice([-1, 1])
        if hours < 0 or self._rng.random() < 0.5:
            self._plan = self._triggered(self._plan.step_clock(peer, hours=hours))
        else:
            self._plan = self._plan.skew_clock(peer, hours=hours)

    def _duration(self) -> float:
        return round(self._rng.choice([0.1, 1.0, 4.0]) * self._seconds * (0.5 + self._rng.random() / 2), 3)

    def _triggered(self, plan: FaultPlan) -> FaultPlan:
        """By a moment, or by a message; of a part or a result only where one is likely to come."""
        rng = self._rng
        counted: list[tuple[Callable[..., Any], int]] = [
            (plan.at_message, _MOST_MESSAGES),
            (plan.after_message, _MOST_MESSAGES),
            (plan.after_receiving, _MOST_MESSAGES),
            (plan.at_part, _MOST_PARTS),
            (plan.after_part, _MOST_PARTS),
            (plan.at_result, _MOST_PARTS),
            (plan.after_result, _MOST_PARTS),
        ]
        if rng.random() < 0.3:
            return plan.at(round(rng.random() * self._seconds, 3))
        method, most = rng.choice(counted)
        made: FaultPlan = method(rng.randint(1, most))
        return made


def _total(hours: float, minutes: float, seconds: float) -> float:
    for name, value in (("hours", hours), ("minutes", minutes), ("seconds", seconds)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
    return hours * 3600.0 + minutes * 60.0 + seconds


def _check_moment(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, at least 0, got {value!r}")
