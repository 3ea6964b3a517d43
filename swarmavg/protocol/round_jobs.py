"""Who does what about parts whose reducer is out, or out of somebody's reach. Pure functions of what the members reported.

A part whose result anybody holds is passed on, never recomputed: whoever committed it stays right. A part nobody holds is
recomputed from the inputs of the live. Its new reducer follows from the group id and the part by rendezvous hashing: the
choice does not move when somebody else is lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Parts that one member serves in one term, besides those of its own range."""

    number: int
    """Unique within the term."""
    server: int
    """Position of the member to which the others open channels."""
    holder: int | None
    """Who hands the results to the server (itself, perhaps); `None` = the server reduces the parts anew."""
    contributors: int
    """Bit p set = the member at position p sends its input; 0 where results are passed on."""
    consumers: int
    """Bit p set = the member at position p fetches the results."""
    parts: tuple[int, ...]
    """Numbers of the parts in the plan's order, ascending."""

    @property
    def recomputes(self) -> bool:
        return self.holder is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the coordinator knows once all reports are in. Positions throughout."""

    salt: bytes
    """The group id: spreads the parts of one lost reducer over the others."""
    owners: Sequence[int]
    """The reducer of each part in the plan."""
    coordinator: int
    live: frozenset[int]
    serves: frozenset[int]
    """Members to which channels can be opened."""
    receives: frozenset[int]
    """Members that contribute inputs and need results."""
    severed: frozenset[tuple[int, int]]
    """(dialling, serving) members whose channel does not work though both live."""
    held: Mapping[int, int]
    """Per live member: bit p set = it holds the result of part p."""

    def may_dial(self, member: int, server: int) -> bool:
        return server in self.serves and (member, server) not in self.severed


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignments:
    """The coordinator's decision: jobs, or members that cannot be helped and must go first."""

    jobs: tuple[Job, ...]
    hopeless: frozenset[int]


class _Unserved(Exception):  # noqa: N818  (control flow within this module)
    def __init__(self, members: Iterable[int]) -> None:
        self.members = frozenset(members)


def assign(situation: Situation) -> Assignments:
    """Jobs for every part that a live member lacks and will not get from its reducer."""
    try:
        return Assignments(jobs=_Assigner(situation).jobs(), hopeless=frozenset())
    except _Unserved as error:
        return Assignments(jobs=(), hopeless=error.members)


class _Assigner:
    def __init__(self, situation: Situation) -> None:
        self._s = situation
        self._receivers = sorted(situation.receives & situation.live)
        self._servers = sorted(situation.serves & situation.live)
        self._plans: dict[tuple[int, int | None, int, int], list[int]] = {}

    def jobs(self) -> tuple[Job, ...]:
        for part, owner in enumerate(self._s.owners):
            lacking = [member for member in self._receivers if not self._s.held[member] >> part & 1]
            if not lacking:
                continue
            if owner in self._s.live:
                self._relay(part, owner, [m for m in lacking if m != owner and not self._s.may_dial(m, owner)])
            elif any(self._s.held[member] >> part & 1 for member in self._receivers):
                self._pass_on(part, lacking)
            else:
                self._recompute(part)
        return tuple(
            Job(number=i, server=server, holder=holder, contributors=inputs, consumers=outputs, parts=tuple(parts))
            for i, ((server, holder, inputs, outputs), parts) in enumerate(self._plans.items())
        )

    def _add(self, part: int, server: int, holder: int | None, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        key = (server, holder, sum(1 << m for m in inputs), sum(1 << m for m in outputs))
        self._plans.setdefault(key, []).append(part)

    def _recompute(self, part: int) -> None:
        """The server that most can reach; the rest of them gets the result by another way, and is not in the average."""
        server = max(self._servers, key=lambda s: (self._reach(s), self._score(part, s)))
        able = [member for member in self._receivers if member == server or self._s.may_dial(member, server)]
        self._add(part, server, None, able, [member for member in able if member != server])
        self._relay(part, server, [member for member in self._receivers if member not in able])

    def _reach(self, server: int) -> int:
        return sum(member == server or self._s.may_dial(member, server) for member in self._receivers)

    def _pass_on(self, part: int, lacking: Sequence[int]) -> None:
        """From a holder to the server, and from there to those who lack it."""
        holders = [member for member in self._receivers if self._s.held[member] >> part & 1]
        self._hand(part, holders, lacking)

    def _relay(self, part: int, owner: int, cut_off: Sequence[int]) -> None:
        """`owner` lives and gives the result to those that reach it: one of them passes it on to the others."""
        if not cut_off:
            return
        sources = [m for m in self._receivers if m == owner or self._s.may_dial(m, owner)]
        try:
            self._hand(part, sources, cut_off)
        except _Unserved:
            if len(cut_off) > sum(m != owner for m in sources) + (owner == self._s.coordinator):
                raise _Unserved([owner]) from None  # more members are cut off from it than can use it
            raise

    def _hand(self, part: int, holders: Sequence[int], consumers: Sequence[int]) -> None:
        remaining = set(consumers)
        for server in sorted(self._servers, key=lambda s: (s not in holders, -self._score(part, s))):
            holder = self._holder_for(server, holders)
            if holder is None:
                continue
            served = {m for m in remaining if m == server or self._s.may_dial(m, server)}
            served -= {server} if server in holders else set()
            if served:
                self._add(part, server, holder, (), sorted(served))
                remaining -= served
            if not remaining:
                return
        raise _Unserved(remaining)

    def _holder_for(self, server: int, holders: Sequence[int]) -> int | None:
        if server in holders:
            return server
        return next((holder for holder in holders if self._s.may_dial(holder, server)), None)

    def _score(self, part: int, server: int) -> int:
        digest = hashlib.sha256(self._s.salt + part.to_bytes(8) + server.to_bytes(8)).digest()
        return int.from_bytes(digest[:8])
