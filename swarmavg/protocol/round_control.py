"""What members of a round tell each other beside the numbers: liveness, fences, reports, assignments. Encoding only.

These messages travel on channels of their own, so that they never queue behind a part. Each carries the term of its sender.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_jobs import Job
from swarmavg.transport.packing import pack, unpack

MAX_DETAIL: Final = 200
MAX_MEMBERS: Final = 4096
MAX_PARTS: Final = 1 << 22
MAX_JOBS_PER_PART: Final = 64
"""How often one part may occur in a term's jobs: once anew, and once for each group of members that it is passed on to."""
MAX_CONTROL_BYTES: Final = 64 * 1024 * 1024
"""Largest payload of a control message: a bitmap of parts, or a list of them."""


class Term(NamedTuple):
    """Whom to obey: the higher term. `rank` is the coordinator's place in the order of succession."""

    number: int
    rank: int

    def __str__(self) -> str:
        return f"{self.number}.{self.rank}"


class Fencing(NamedTuple):
    """That somebody goes on without this member: in which term, and with whom."""

    term: Term
    live: int
    """Bit p set = the member at position p."""

    def __str__(self) -> str:
        return f"{self.term}.{self.live:x}"


class LinkId(NamedTuple):
    """A data channel: the member that sends inputs (or asks for results) and the one that serves."""

    contributor: int
    reducer: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Severed:
    """A data channel that failed though both ends live."""

    link: LinkId
    accused: int
    """The end that the other one complained about."""
    code: ExclusionCode = field(compare=False)
    detail: str = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """I can no longer work with `accused`."""

    accused: int
    link: LinkId | None
    """The data channel that failed; `None` for a control channel or a member that never came."""
    code: ExclusionCode
    detail: str
    left: bool = False
    """The accused said itself that it takes no part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Are you there?"""

    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Answer to a probe."""

    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Have you heard from this member lately?"""

    about: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Yes, I have."""

    about: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A new term begins. All of `out` and `severed` since the round began, so that one fence suffices."""

    out: tuple[tuple[int, ExclusionCode, str], ...]
    severed: tuple[Severed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a member holds as the term begins. `held`: bit p = the result of part p, in the order of the plan."""

    committed: bool
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Who does what about the parts that somebody lacks."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """I have committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Everybody has committed: the round is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """I give the round up."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlBeat:
    """I am alive."""

    missing: int
    """Parts whose results I lack."""


ControlMessage = Suspect | Probe | Alive | Ask | Heard | Fence | Report | Assign | Done | Closed | Leave | ControlBeat


def encode_control(term: Term, message: ControlMessage) -> tuple[bytes, bytes]:
    """Header and payload (may be empty)."""
    kind, fields, payload = _WRITERS[type(message)](message)
    return pack([kind, term.number, term.rank, *fields]), payload


def decode_control(header: bytes, payload: memoryview, *, parts: int = MAX_PARTS) -> tuple[Term, ControlMessage]:
    """Read a message of a round whose plan has so many parts. Raises `RemoteProtocolError` for anything that
    `encode_control` has not made.
    """
    fields = unpack(header, what="control message")
    try:
        if not isinstance(fields, list) or len(fields) < 3:
            raise TypeError("not a list")
        kind, number, rank, *rest = fields
        return Term(_count(number), _count(rank)), _READERS[kind](_Payload(payload, parts), *rest)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RemoteProtocolError(f"malformed control message: {error}") from None


def _count(value: Any, below: int = 1 << 48) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is not a count")
    return value


def _position(value: Any) -> int:
    return _count(value, MAX_MEMBERS)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4 * MAX_DETAIL:
        raise ValueError("expected a short text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("expected a bool")
    return value


def _short(text: str) -> str:
    return text if len(text) <= MAX_DETAIL else text[: MAX_DETAIL - 1] + "…"


def bits_to_bytes(bits: int) -> bytes:
    """A bitmap, least significant byte first, without trailing zeros."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def _link(value: Any) -> LinkId | None:
    return None if value is None else _some_link(value)


def _some_link(value: Any) -> LinkId:
    contributor, reducer = value
    return LinkId(_position(contributor), _position(reducer))


class _Payload(NamedTuple):
    data: memoryview
    parts: int


_Written = tuple[str, list[Any], bytes]


def _write_suspect(m: Suspect) -> _Written:
    link = None if m.link is None else list(m.link)
    return "suspect", [m.accused, link, m.code.value, _short(m.detail), m.left], b""


def _read_suspect(_: _Payload, accused: Any, link: Any, code: Any, detail: Any, left: Any) -> Suspect:
    return Suspect(
        accused=_position(accused), link=_link(link), code=ExclusionCode(code), detail=_text(detail), left=_flag(left)
    )


def _write_fence(m: Fence) -> _Written:
    """Particulars of many members would not fit into a header: they travel as payload."""
    out = [[position, code.value, _short(detail)] for position, code, detail in m.out]
    severed = [[list(s.link), s.accused, s.code.value, _short(s.detail)] for s in m.severed]
    return "fence", [], pack([out, severed])


def _read_fence(payload: _Payload) -> Fence:
    out, severed = unpack(payload.data, what="fence", max_bytes=MAX_CONTROL_BYTES, max_items=MAX_PARTS)
    return Fence(
        out=tuple((_position(position), ExclusionCode(code), _text(detail)) for position, code, detail in out),
        severed=tuple(
            Severed(link=_some_link(link), accused=_position(accused), code=ExclusionCode(code), detail=_text(detail))
            for link, accused, code, detail in severed
        ),
    )


def _read_report(payload: _Payload, committed: Any) -> Report:
    if len(payload.data) > (payload.parts + 7) // 8:
        raise ValueError("a bitmap of too many parts")
    return Report(committed=_flag(committed), held=int.from_bytes(payload.data, "little"))


def _write_assign(m: Assign) -> _Written:
    jobs = [
        [job.server, job.holder, bits_to_bytes(job.contributors), bits_to_bytes(job.consumers), _runs(job.parts)]
        for job in m.jobs
    ]
    return "assign", [], pack(jobs)


def _read_assign(payload: _Payload) -> Assign:
    jobs = unpack(payload.data, what="assignments", max_bytes=MAX_CONTROL_BYTES, max_items=MAX_PARTS)
    return Assign(
        jobs=tuple(
            Job(
                number=number,
                server=_position(server),
                holder=None if holder is None else _position(holder),
                contributors=_mask(contributors),
                consumers=_mask(consumers),
                parts=tuple(numbers),
            )
            for number, ((server, holder, contributors, consumers, _), numbers) in enumerate(
                zip(jobs, _unrolled([runs for _, _, _, _, runs in jobs], payload.parts), strict=True)
            )
        )
    )


def _mask(value: Any) -> int:
    if not isinstance(value, bytes) or len(value) > MAX_MEMBERS // 8:
        raise ValueError("expected a set of members")
    return int.from_bytes(value, "little")


def _runs(parts: tuple[int, ...]) -> list[int]:
    """Ascending numbers as lengths of gaps and runs: [gap, run, gap, run, ...]."""
    lengths: list[int] = []
    expected = 0
    for part in parts:
        if lengths and part == expected:
            lengths[-1] += 1
        else:
            lengths += [part - expected, 1]
        expected = part + 1
    return lengths


def _unrolled(jobs: list[Any], parts: int) -> list[list[int]]:
    """The inverse for all jobs. A part may be in a few of them; the sum is bounded before anything is unrolled."""
    total = sum(_count(run, MAX_PARTS) for runs in jobs for run in runs[1::2])
    if total > parts * MAX_JOBS_PER_PART:
        raise ValueError(f"jobs of {total} parts, where the plan has {parts}")
    return [_ascending(runs, parts) for runs in jobs]


def _ascending(runs: Any, parts: int) -> list[int]:
    numbers: list[int] = []
    at = 0
    for gap, run in zip(runs[::2], runs[1::2], strict=True):
        at += _count(gap, MAX_PARTS)
        if at + run > parts:
            raise ValueError(f"part {at + run - 1} of a plan that has {parts}")
        numbers.extend(range(at, at + run))
        at += run
    return numbers


_WRITERS: Final[dict[type, Callable[[Any], _Written]]] = {
    Suspect: _write_suspect,
    Probe: lambda m: ("probe", [m.serial], b""),
    Alive: lambda m: ("alive", [m.serial], b""),
    Ask: lambda m: ("ask", [m.about], b""),
    Heard: lambda m: ("heard", [m.about], b""),
    Fence: _write_fence,
    Report: lambda m: ("report", [m.committed], bits_to_bytes(m.held)),
    Assign: _write_assign,
    Done: lambda _: ("done", [], b""),
    Closed: lambda _: ("closed", [], b""),
    Leave: lambda m: ("leave", [_short(m.reason)], b""),
    ControlBeat: lambda m: ("beat", [m.missing], b""),
}

_READERS: Final[dict[str, Callable[..., ControlMessage]]] = {
    "suspect": _read_suspect,
    "probe": lambda _, serial: Probe(serial=_count(serial)),
    "alive": lambda _, serial: Alive(serial=_count(serial)),
    "ask": lambda _, about: Ask(about=_position(about)),
    "heard": lambda _, about: Heard(about=_position(about)),
    "fence": _read_fence,
    "report": _read_report,
    "assign": _read_assign,
    "done": lambda _: Done(),
    "closed": lambda _: Closed(),
    "leave": lambda _, reason: Leave(reason=_text(reason)),
    "beat": lambda _, missing: ControlBeat(missing=_count(missing)),
}
