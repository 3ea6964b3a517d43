"""What can befall peers and links of a simulation: one frozen value per fault, which can be done, undone, told and replayed.

When it happens is a `Trigger`. Nothing here knows of messages or timers: see `fault_runner`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

from swarmavg.identifiers import PeerId
from swarmavg.transport.memory import MemoryNetwork

Where = Literal["frame", "header", "payload"]

TRIGGERS: Final = {
    "at": "{n:g} s after the start",
    "at_message": "when {who} is about to send its message {n}",
    "after_message": "when message {n} of {who} is on its way",
    "at_part": "when {who} is about to send its part {n}",
    "after_part": "when part {n} of {who} is on its way",
    "at_result": "when {who} is about to send its result {n}",
    "after_result": "when result {n} of {who} is on its way",
    "after_receiving": "when {who} has received {n} messages",
}
"""Names of the triggers, which are those of `FaultPlan`'s methods, and how to tell them."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a fault happens: a moment in virtual seconds, or the n-th event of a kind of one peer, counted from 1."""

    kind: str
    n: float
    of: int | None = None
    """Whose messages count; `None` = those of the first peer of the fault."""

    def describe(self, fallback: int) -> str:
        return TRIGGERS[self.kind].format(n=self.n, who=f"peer {fallback if self.of is None else self.of}")

    def __repr__(self) -> str:
        return f"{self.kind}({self.n!r})" if self.of is None else f"{self.kind}({self.n!r}, of={self.of})"


class Battlefield(Protocol):
    """What faults act upon."""

    @property
    def network(self) -> MemoryNetwork: ...

    def id_of(self, number: int) -> PeerId: ...

    def kill(self, number: int, *, abrupt: bool) -> None: ...

    def freeze(self, number: int) -> None: ...

    def thaw(self, number: int) -> None: ...

    def step_clock(self, number: int, seconds: float) -> None: ...

    def corrupt_next(self, number: int, where: Where) -> None: ...

    def restore_bandwidth(self, source: int, target: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Fault(ABC):
    """Base of all faults. `repr` is the call that adds it to a plan."""

    @property
    def name(self) -> str:
        """Of the method of `FaultPlan` that makes it."""
        return repr(self).partition("(")[0]

    @property
    @abstractmethod
    def peers(self) -> tuple[int, ...]:
        """Whom it befalls; for a link, source and target."""

    @property
    def lasts(self) -> float | None:
        """Seconds after which it is undone; `None` = never."""
        return None

    @abstractmethod
    def begin(self, field: Battlefield) -> None: ...

    def end(self, field: Battlefield) -> None:  # noqa: B027  (what lasts for ever has no end)
        """Undo it."""

    @abstractmethod
    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True, repr=False)
class Kill(Fault):
    """A process ends, as by ``kill -9``."""

    peer: int
    abrupt: bool = False

    def __post_init__(self) -> None:
        check_peer("peer", self.peer)

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.peer,)

    def begin(self, field: Battlefield) -> None:
        field.kill(self.peer, abrupt=self.abrupt)

    def describe(self) -> str:
        return f"kill peer {self.peer}" + (", losing what it has under way," if self.abrupt else "")

    def __repr__(self) -> str:
        return f"kill({self.peer}{', abrupt=True' if self.abrupt else ''})"


@dataclass(frozen=True, slots=True, repr=False)
class Freeze(Fault):
    """A process stands still and goes on later, as by SIGSTOP and SIGCONT."""

    peer: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_peer("peer", self.peer)
        _check_duration(self.seconds)

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.peer,)

    @property
    def lasts(self) -> float | None:
        return self.seconds

    def begin(self, field: Battlefield) -> None:
        field.freeze(self.peer)

    def end(self, field: Battlefield) -> None:
        field.thaw(self.peer)

    def describe(self) -> str:
        return f"freeze peer {self.peer}{_duration(self.seconds)}"

    def __repr__(self) -> str:
        return f"freeze({self.peer}{_keyword('seconds', self.seconds)})"


@dataclass(frozen=True, slots=True, repr=False)
class LinkFault(Fault):
    """Base of what befalls the link between two peers."""

    a: int
    b: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_peer("a", self.a)
        check_peer("b", self.b)
        if self.a == self.b:
            raise ValueError(f"a link joins two peers, got a={self.a} and b={self.b}")
        _check_duration(self.seconds)

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.a, self.b)

    @property
    def lasts(self) -> float | None:
        return self.seconds

    def ends(self, field: Battlefield) -> tuple[PeerId, PeerId]:
        return field.id_of(self.a), field.id_of(self.b)


class Cut(LinkFault):
    """Nothing passes, in either direction; what was sent meanwhile arrives when the cut is healed."""

    __slots__ = ()

    def begin(self, field: Battlefield) -> None:
        field.network.cut(*self.ends(field))

    def end(self, field: Battlefield) -> None:
        field.network.heal(*self.ends(field))

    def describe(self) -> str:
        return f"cut peers {self.a} and {self.b} off from each other{_duration(self.seconds)}"

    def __repr__(self) -> str:
        return f"cut({self.a}, {self.b}{_keyword('seconds', self.seconds)})"


class Stall(LinkFault):
    """No more bytes leave the source for the target, though the link counts as up. What is under way arrives."""

    __slots__ = ()

    def begin(self, field: Battlefield) -> None:
        field.network.stall(*self.ends(field))

    def end(self, field: Battlefield) -> None:
        field.network.unstall(*self.ends(field))

    def describe(self) -> str:
        return f"stall the link from peer {self.a} to peer {self.b}{_duration(self.seconds)}"

    def __repr__(self) -> str:
        return f"stall({self.a}, {self.b}{_keyword('seconds', self.seconds)})"


@dataclass(frozen=True, slots=True, repr=False)
class Slow(LinkFault):
    """The link from source to target has another bandwidth."""

    bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        LinkFault.__post_init__(self)
        if not 0 < self.bytes_per_second < math.inf:
            raise ValueError(f"bytes_per_second must be a positive number, got {self.bytes_per_second!r}")

    def begin(self, field: Battlefield) -> None:
        source, target = self.ends(field)
        field.network.set_link(source, target, bandwidth=self.bytes_per_second)

    def end(self, field: Battlefield) -> None:
        field.restore_bandwidth(self.a, self.b)

    def describe(self) -> str:
        rate = f"{self.bytes_per_second:g} bytes per second"
        return f"slow the link from peer {self.a} to peer {self.b} to {rate}{_duration(self.seconds)}"

    def __repr__(self) -> str:
        return f"slow({self.a}, {self.b}, bytes_per_second={self.bytes_per_second!r}{_keyword('seconds', self.seconds)})"


@dataclass(frozen=True, slots=True, repr=False)
class Corrupt(Fault):
    """Bits of one message flip on its way."""

    peer: int
    where: Where = "frame"

    def __post_init__(self) -> None:
        check_peer("peer", self.peer)
        if self.where not in get_args(Where):
            raise ValueError(f"where must be one of {', '.join(get_args(Where))}, got {self.where!r}")

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.peer,)

    def begin(self, field: Battlefield) -> None:
        field.corrupt_next(self.peer, self.where)

    def describe(self) -> str:
        return f"corrupt the {self.where} of the next message of peer {self.peer}"

    def __repr__(self) -> str:
        return f"corrupt({self.peer}{_keyword('where', None if self.where == 'frame' else self.where)})"


@dataclass(frozen=True, slots=True, repr=False)
class StepClock(Fault):
    """The wall clock of a process is set, as by an administrator; the monotonic one cannot be."""

    peer: int
    seconds: float

    def __post_init__(self) -> None:
        check_peer("peer", self.peer)
        if not math.isfinite(self.seconds) or not self.seconds:
            raise ValueError(f"a clock is stepped by a finite time other than 0, got {self.seconds!r} seconds")

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.peer,)

    def begin(self, field: Battlefield) -> None:
        field.step_clock(self.peer, self.seconds)

    def describe(self) -> str:
        return f"step the wall clock of peer {self.peer} by {self.seconds:+g} s"

    def __repr__(self) -> str:
        return f"step_clock({self.peer}, seconds={self.seconds!r})"


@dataclass(frozen=True, slots=True, repr=False)
class SkewClock(Fault):
    """All clocks of a process are ahead of the others' from its start, the event loop's too. The swarm asks for it itself."""

    peer: int
    seconds: float

    def __post_init__(self) -> None:
        check_peer("peer", self.peer)
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"a clock is skewed by a positive, finite time, got {self.seconds!r} seconds")

    @property
    def peers(self) -> tuple[int, ...]:
        return (self.peer,)

    def begin(self, field: Battlefield) -> None:
        """Nothing: the process was made so."""

    def describe(self) -> str:
        return f"skew the clocks of peer {self.peer} by {self.seconds:+g} s"

    def __repr__(self) -> str:
        return f"skew_clock({self.peer}, seconds={self.seconds!r})"


def check_peer(name: str, value: object) -> None:
    """Raise `ValueError` unless it is the number of a peer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be the number of a peer, from 0, got {value!r}")


def _check_duration(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a positive, finite number, or None for no end, got {seconds!r}")


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:g} s"


def _keyword(name: str, value: object) -> str:
    return "" if value is None else f", {name}={value!r}"
