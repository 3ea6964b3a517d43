"""What became of a round for one member: which parts it holds, who is in them, who was left out. Plain bookkeeping."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from swarmavg.identifiers import PeerId
from swarmavg.planning.partition import Layout, Part, Plan, Span


class ExclusionCode(enum.Enum):
    """Why a member was left out of a round, or of the rest of it."""

    UNREACHABLE = "unreachable"
    NEVER_ARRIVED = "never-arrived"
    CONNECTION_LOST = "connection-lost"
    SILENT = "silent"
    STALLED = "stalled"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    PROTOCOL_VIOLATION = "protocol-violation"
    SEVERED = "severed"
    """It lives, but a channel between it and one of the reducers failed: it is missing from that range."""
    FENCED = "fenced"
    """It went on without us, or we without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """One member left out, with a code for programs and the particulars for people."""

    peer_id: PeerId
    code: ExclusionCode
    detail: str

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}" if self.detail else self.code.value


@dataclass(slots=True)
class RoundFate:
    """What becomes of a round after a member has its result."""

    diverged: bool = False


class Ledger:
    """The parts of a round whose results this member holds, by their numbers: all reducers' parts, one range after another."""

    def __init__(self, layout: Layout, plan: Plan, members: Sequence[PeerId]) -> None:
        self._layout = layout
        self._members = tuple(members)
        self.parts = plan.all_parts
        self._masks: list[int | None] = [None] * len(self.parts)
        self.bits = 0
        """Bit p set = the result of part p is held."""
        self.elements_held = 0

    def holds(self, number: int) -> bool:
        return self._masks[number] is not None

    def contributors_of(self, number: int) -> int:
        """Bits of the members in the average of a part that is held."""
        mask = self._masks[number]
        assert mask is not None
        return mask

    def record(self, number: int, contributors: int) -> None:
        """The result of a part has come in, for the first time."""
        self._masks[number] = contributors
        self.bits |= 1 << number
        self.elements_held += len(self.parts[number])

    @property
    def complete(self) -> bool:
        return self.elements_held == self._layout.total

    @property
    def progress(self) -> float:
        """Fraction of the vector's elements whose results are in; 1.0 for an empty vector."""
        return self.elements_held / self._layout.total if self._layout.total else 1.0

    def averaged_parts(self) -> list[Part]:
        """Parts that hold an average, to be committed."""
        return [part for part, mask in self._results() if mask]

    def fraction(self) -> float:
        """Fraction of the elements that were averaged; 1.0 for an empty vector."""
        if not self._layout.total:
            return 1.0
        return sum(len(part) for part in self.averaged_parts()) / self._layout.total

    def missing(self) -> list[Span]:
        """Elements whose result never came: they keep local values."""
        return self._layout.spans(part for part, mask in zip(self.parts, self._masks, strict=True) if mask is None)

    def contributors(self) -> list[tuple[Span, tuple[PeerId, ...]]]:
        """Who is in the average of which elements, sorted by span; nobody where all weights were 0."""
        by_mask: dict[int, list[Part]] = {}
        for part, mask in self._results():
            by_mask.setdefault(mask, []).append(part)
        return sorted(
            ((span, self._peers(mask)) for mask, parts in by_mask.items() for span in self._layout.spans(parts)),
            key=lambda entry: entry[0],
        )

    def contributed_by(self) -> int:
        """Bits of all members that are in at least one average."""
        bits = 0
        for _, mask in self._results():
            bits |= mask
        return bits

    def _results(self) -> list[tuple[Part, int]]:
        return [(part, mask) for part, mask in zip(self.parts, self._masks, strict=True) if mask is not None]

    def _peers(self, mask: int) -> tuple[PeerId, ...]:
        return tuple(peer for position, peer in enumerate(self._members) if mask >> position & 1)
