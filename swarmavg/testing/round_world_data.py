"""The numbers' way through a simulated round, without the numbers: who has delivered what, and which result is where.

A result is a value that says what it is the average of and who made it: members that hold equal values hold equal bits, and two
that were computed apart are never equal. For `round_world`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swarmavg.protocol.round_control import LinkId, Term
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_messages import ChannelKind


class Result(NamedTuple):
    """The average of one part."""

    part: int
    contributors: int
    maker: int
    serial: int
    """No two results that were computed share it."""


class Serving:
    """What one member serves: parts that it reduces, or results that it passes on."""

    def __init__(self, me: int, job: Job | None, parts: Sequence[int], contributors: set[int], now: float) -> None:
        self.me = me
        self.job = job
        self.parts = parts
        self.since = now
        self.reduces = job is None or job.recomputes
        self.own = self.reduces and me in contributors
        self.pending = set(contributors)
        """Members whose inputs are waited for."""
        self.delivered: list[set[int]] = [{me} if self.own else set() for _ in parts]
        self.results: list[Result] = []
        self.over = False
        if self.reduces:
            self.awaited = contributors - {me}
        else:
            assert job is not None
            self.awaited = members_of(job.consumers) | ({job.holder} if job.holder is not None else set())
            self.awaited -= {me}

    def finished(self, serials: Iterator[int]) -> list[Result]:
        """Results of further parts, now that everybody has delivered them who still may."""
        made: list[Result] = []
        while self.reduces and len(self.results) < len(self.parts) and self._complete(len(self.results)):
            index = len(self.results)
            mask = sum(1 << member for member in self.delivered[index])
            self.results.append(Result(self.parts[index], mask, self.me, next(serials)))
            made.append(self.results[-1])
        return made

    def _complete(self, index: int) -> bool:
        return self.pending - {self.me} <= self.delivered[index]


@dataclass(eq=False)
class Data:
    """A data channel, seen by both ends."""

    dialler: int
    server: int
    kind: ChannelKind
    job: Job | None
    term: Term
    parts: Sequence[int]
    opened: float
    serving: Serving | None = None
    """At the server, once it has accepted the channel."""
    over: bool = False
    complete: bool = False
    ended_at: set[int] = field(default_factory=set)
    """Ends that know that it failed."""
    sent: int = 0
    """Parts whose inputs (or, if results are pushed, results) have reached the server."""
    returned: int = 0
    """Parts whose results have reached whoever opened the channel."""
    heard: dict[int, float] = field(default_factory=dict)
    """By end: when the other one could last be heard."""
    due: bool = False
    """Its next step is in the world's queue."""

    @property
    def id(self) -> LinkId:
        return LinkId(self.dialler, self.server)

    @property
    def number(self) -> int | None:
        return None if self.job is None else self.job.number

    def other(self, member: int) -> int:
        return self.server if member == self.dialler else self.dialler


@dataclass(eq=False)
class Holdings:
    """What one member has."""

    results: dict[int, Result] = field(default_factory=dict)
    """In its snapshot, where they have replaced the inputs."""
    kept: dict[int, Result] = field(default_factory=dict)
    """In an auxiliary peer, which has no snapshot and passes them on."""
    committed: dict[int, Result] | None = None

    @property
    def bits(self) -> int:
        return sum(1 << part for part in self.results)

    def find(self, part: int) -> Result | None:
        return self.results.get(part, self.kept.get(part))


def members_of(mask: int) -> set[int]:
    return {position for position in range(mask.bit_length()) if mask >> position & 1}
