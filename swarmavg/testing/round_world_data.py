"""The numbers' way through a simulated round, without the numbers: who has delivered what, and which result is where.

A result is a value that says what it is the average of, who made it and when: members that hold equal values hold equal bits,
and two that somebody computed apart are never equal. For `round_world`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """No two results that were computed have the same."""


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
    accepted: bool = False
    over: bool = False
    sent: int = 0
    """Parts whose inputs, or whose results if they are pushed, have reached the server."""
    returned: int = 0
    """Parts whose results have reached whoever opened the channel."""
    on_its_way: bool = False
    """A step of it is due in the world's queue."""

    @property
    def id(self) -> LinkId:
        return LinkId(self.dialler, self.server)

    @property
    def number(self) -> int | None:
        return None if self.job is None else self.job.number

    def other(self, member: int) -> int:
        return self.server if member == self.dialler else self.dialler


class Serving:
    """What one member serves: parts that it reduces, or a job of results that it passes on."""

    def __init__(self, me: int, job: Job | None, parts: Sequence[int], contributors: Iterable[int], makes: bool) -> None:
        self.job = job
        self.parts = parts
        self.makes = makes
        """Whether it reduces."""
        self.own = me in set(contributors)
        self.awaited = set(contributors) - {me}
        """Members that have yet to open their channel."""
        if job is not None and not job.recomputes:
            self.awaited = {m for m in range(job.consumers.bit_length()) if job.consumers >> m & 1} - {me}
            self.awaited |= {job.holder} - {me, None} if job.holder is not None else set()  # type: ignore[arg-type]
        self.pending = set(contributors)
        self.delivered: list[set[int]] = [set() for _ in parts]
        self.results: list[Result] = []
        self.me = me

    def add_own(self) -> None:
        if self.own:
            for delivered in self.delivered:
                delivered.add(self.me)
            self.pending.discard(self.me)

    def finish(self, serial: Iterable[int]) -> list[Result]:
        """Parts that everybody has delivered who still may, in order."""
        made: list[Result] = []
        while self.makes and len(self.results) < len(self.parts) and self.pending <= self.delivered[len(self.results)]:
            index = len(self.results)
            mask = sum(1 << member for member in self.delivered[index])
            result = Result(self.parts[index], mask, self.me, next(iter(serial)))
            self.results.append(result)
            made.append(result)
        return made


@dataclass(eq=False)
class Holdings:
    """What one member has."""

    me: int
    results: dict[int, Result] = field(default_factory=dict)
    """Its snapshot: these have replaced the inputs."""
    kept: dict[int, Result] = field(default_factory=dict)
    """Of an auxiliary peer, which has no snapshot: what it passes on."""
    committed: dict[int, Result] | None = None

    @property
    def bits(self) -> int:
        return sum(1 << part for part in self.results)

    def find(self, part: int) -> Result | None:
        return self.results.get(part, self.kept.get(part))
