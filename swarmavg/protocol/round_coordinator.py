"""The coordinator's half of a round: suspicions, probes, fences, reports, assignments, the end.

Every resolved suspicion becomes a new term. With one term per member lost or channel severed, a round ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import (
    Alive,
    Ask,
    Assign,
    Closed,
    Fence,
    Heard,
    Leave,
    LinkId,
    Probe,
    Report,
    Severed,
    Suspect,
    Term,
)
from swarmavg.protocol.round_core import RoundCore
from swarmavg.protocol.round_jobs import Situation, assign


@dataclass(slots=True)
class _Inquiry:
    """A member is suspected: does it answer?"""

    accused: int
    code: ExclusionCode
    detail: str
    began: float
    deadline: float
    serial: int
    links: dict[LinkId, Severed] = field(default_factory=dict)
    hearer: int | None = None
    """Who has heard from it lately, and could coordinate."""
    handed: bool = False
    came: bool = False
    """A channel with it stood once more: it was given more time, once."""


_CUT_OFF: Final = (ExclusionCode.SEVERED, "its channels failed, and nobody can pass on to it what it lacks")


class OwnPart(Protocol):
    """The member's half of the coordinator's own machine, which obeys like everybody else."""

    def obey(self, fence: Fence, term: Term, now: float) -> None: ...

    def take_up(self, message: Assign, now: float) -> None: ...

    def resign(self, now: float) -> None:
        """The others cannot work with this very member."""

    def finish(self, now: float) -> None:
        """Everybody has everything."""


class Coordinator:
    """Active in the member that coordinates the present term, or is about to take over."""

    def __init__(self, core: RoundCore, member: OwnPart, *, active: bool) -> None:
        self._core = core
        self._member = member
        self.active = active
        self._inquiries: dict[int, _Inquiry] = {}
        self._lost: dict[int, tuple[ExclusionCode, str]] = {}
        """Found out, to be fenced."""
        self._severed: dict[LinkId, Severed] = {}
        """The same, of channels."""
        self._complaints: dict[int, tuple[ExclusionCode, str]] = {}
        """The first about each member."""
        self._first: dict[LinkId, Severed] = {}
        """The first about each channel: the other end's view of the same failure comes later."""
        self._take_over = False
        self._reports: dict[int, Report] | None = None
        """While reports of this term are collected."""
        self._due: dict[int, float] = {}
        self._assign: Assign | None = None
        self._done: set[int] = set()
        self._closed = False
        self._serial = 0
        self._outbid = 0
        """The number of a term that somebody made up in the name of this member."""

    # For the member's half

    def take_over(self, now: float) -> None:
        """Become the coordinator of the next term, as soon as it is clear who belongs to it."""
        if not self.active:
            self._core.tell(now, "I take over as the coordinator")
            self.active = True
            self._reports = None
        self._take_over = True

    def outbid(self, number: int, now: float) -> None:
        """Members obey a term that this member is said to have begun, and has not: begin a higher one."""
        self._outbid = max(self._outbid, number)
        self.take_over(now)

    def give_way(self) -> None:
        """Another member's term is higher."""
        self.active = self._take_over = False
        self._reports = None
        self._assign = None
        self._inquiries.clear()
        self._lost.clear()
        self._severed.clear()

    def suspect(self, message: Suspect, now: float) -> None:
        """Look into it."""
        core, accused = self._core, message.accused
        known = accused in core.out or accused in self._lost
        if known or not 0 <= accused < len(core.setting.names) or (message.link is not None and message.link in core.severed):
            return
        self._complaints.setdefault(accused, (message.code, message.detail))
        links = {}
        if message.link is not None:
            severed = Severed(link=message.link, accused=accused, code=message.code, detail=message.detail)
            links = {message.link: self._first.setdefault(message.link, severed)}
        if accused == core.me:
            self._severed |= links
            return
        if message.left and accused not in core.connected:
            self._lost[accused] = (ExclusionCode.CANCELLED, message.detail)
            return
        inquiry = self._inquiries.get(accused)
        if inquiry is None:
            self._serial += 1
            inquiry = self._inquiries[accused] = _Inquiry(
                accused, message.code, message.detail, now, now + core.setting.request_timeout, self._serial
            )
            if accused in core.connected or accused in core.setting.serves:
                core.send(accused, Probe(serial=inquiry.serial), now)
            for member in sorted(core.live & (core.connected | core.setting.serves) - {core.me, accused}):
                core.send(member, Ask(about=accused), now)
        inquiry.links = links | inquiry.links

    def alive(self, member: int, message: Alive) -> None:
        inquiry = self._inquiries.get(member)
        if inquiry is not None and message.serial == inquiry.serial:
            del self._inquiries[member]
            self._severed |= inquiry.links

    def heard(self, member: int, message: Heard) -> None:
        inquiry = self._inquiries.get(message.about)
        if inquiry is not None and inquiry.hearer is None and member in self._core.setting.serves:
            inquiry.hearer = member

    def up(self, member: int, now: float) -> None:
        """A control channel with a member stands (again)."""
        inquiry = self._inquiries.get(member)
        if inquiry is not None:
            if not inquiry.came:
                inquiry.came = True
                inquiry.deadline = now + self._core.setting.request_timeout
            self._core.send(member, Probe(serial=inquiry.serial), now)

    def lost(self, member: int, code: ExclusionCode, detail: str, now: float) -> None:
        """The control channel with a member is gone, or could not be opened."""
        core = self._core
        if member in core.out or member in self._lost or self._closed:
            return
        inquiry = self._inquiries.get(member)
        if inquiry is None:
            self.suspect(Suspect(accused=member, link=None, code=code, detail=detail), now)
        elif member not in core.setting.serves:
            pass  # it may come again
        elif code not in (ExclusionCode.UNREACHABLE, ExclusionCode.REFUSED):
            core.send(member, Probe(serial=inquiry.serial), now)  # an open channel was lost: call it anew
        elif now < inquiry.began + core.setting.request_timeout / 2:  # nobody is there when called
            del self._inquiries[member]
            self._lost[member] = (inquiry.code, inquiry.detail)
        else:
            inquiry.deadline = min(inquiry.deadline, now)

    def left(self, member: int, reason: str) -> None:
        """A member has said that it takes no part any longer."""
        if member not in self._core.out and not self._closed:
            self._inquiries.pop(member, None)
            self._lost.setdefault(member, (ExclusionCode.CANCELLED, reason))

    def report(self, member: int, message: Report, now: float) -> None:
        if self._reports is not None:
            self._reports[member] = message
        elif self._assign is not None:  # its assignments were lost on the way
            self._core.send(member, self._assign, now)
        if message.committed:
            self._done.add(member)

    def done(self, member: int) -> None:
        self._done.add(member)

    def forgive(self, seconds: float) -> None:
        """The own process stood still: nobody is blamed for that time."""
        for inquiry in self._inquiries.values():
            inquiry.deadline += seconds
            inquiry.began += seconds
        self._due = {member: due + seconds for member, due in self._due.items()}

    def expire(self, now: float, alarms: list[float]) -> bool:
        """Apply the rules that are due. Returns whether anything changed."""
        if not self.active or self._closed:
            return False
        return (
            self._expire_inquiries(now, alarms)
            or self._begin_term(now)
            or self._expire_reports(now, alarms)
            or self._hand_out(now)
            or self._close(now)
        )

    # Rules

    def _expire_inquiries(self, now: float, alarms: list[float]) -> bool:
        core = self._core
        for inquiry in list(self._inquiries.values()):
            if now < inquiry.deadline:
                alarms.append(inquiry.deadline)
                continue
            if inquiry.hearer is not None and not inquiry.handed and core.term.number <= len(core.setting.names):
                self._hand_over(inquiry, inquiry.hearer, now)
            else:
                del self._inquiries[inquiry.accused]
                self._lost[inquiry.accused] = (inquiry.code, inquiry.detail)
            return True
        return False

    def _hand_over(self, inquiry: _Inquiry, hearer: int, now: float) -> None:
        """The accused lives, but not for us: whoever hears it shall coordinate, and keep us both."""
        core = self._core
        inquiry.handed = True
        inquiry.deadline = now + 3 * core.setting.request_timeout
        detail = f"{core.name(core.me)} and {core.name(inquiry.accused)} do not reach each other"
        suspicion = Suspect(accused=core.coordinator, link=None, code=ExclusionCode.SEVERED, detail=detail)
        core.send(hearer, suspicion, now)

    def _begin_term(self, now: float) -> bool:
        core = self._core
        severed = {link: why for link, why in self._severed.items() if link not in core.severed}
        lost = {member: why for member, why in self._lost.items() if member not in core.out}
        self._severed.clear()
        if not (lost or severed or self._take_over) or self._inquiries:
            self._severed |= severed
            return False
        self._lost.clear()
        self._take_over = False
        term = Term(max(core.term.number, self._outbid) + 1, core.succession.index(core.me))
        out = {**core.out, **lost}
        fence = Fence(
            out=tuple((member, code, detail) for member, (code, detail) in sorted(out.items())),
            severed=tuple(sorted((core.severed | severed).values())),
        )
        self._assign = None
        self._reports = {}
        self._done = set()
        self._due = {
            member: now + self._report_time(member)
            for member in range(len(core.setting.names))
            if member not in out and member != core.me
        }
        self._member.obey(fence, term, now)
        for member in range(len(core.setting.names)):
            if member in self._due or (member in core.connected and member != core.me):
                core.send(member, fence, now)
        return True

    def _report_time(self, member: int) -> float:
        setting = self._core.setting
        if member in self._core.connected:
            return setting.request_timeout
        if member in setting.serves:
            return 2 * setting.request_timeout
        return setting.patience + setting.request_timeout  # it has to find out by itself whom to call

    def _expire_reports(self, now: float, alarms: list[float]) -> bool:
        if self._reports is None:
            return False
        for member in sorted(self._core.live - self._reports.keys() - {self._core.me}):
            if now >= self._due[member]:
                if member in self._lost or member in self._inquiries:
                    continue
                self._lost[member] = (ExclusionCode.SILENT, "it did not report in time")
                return True
            alarms.append(self._due[member])
        return False

    def _hand_out(self, now: float) -> bool:
        core, reports = self._core, self._reports
        if reports is None or self._inquiries or not core.live <= reports.keys():
            return False
        assignments = assign(
            Situation(
                salt=core.setting.salt,
                owners=core.setting.owners,
                coordinator=core.me,
                live=core.live,
                serves=core.setting.serves,
                receives=core.setting.receives,
                severed=frozenset(core.severed),
                held={member: report.held for member, report in reports.items()},
            )
        )
        if core.me in assignments.hopeless:
            self._resign(now)
            return True
        if assignments.hopeless:
            for member in assignments.hopeless:
                self._lost[member] = self._complaints.get(member, _CUT_OFF)
            return True
        self._reports = None
        self._assign = Assign(jobs=assignments.jobs)
        for member in sorted(core.live - {core.me}):
            core.send(member, self._assign, now)
        self._member.take_up(self._assign, now)
        return True

    def _resign(self, now: float) -> None:
        """The others cannot work with this very member."""
        core = self._core
        for member in sorted(core.live & core.connected - {core.me}):
            core.send(member, Leave(reason="too many members cannot work with me"), now)
        self.give_way()
        self._member.resign(now)

    def _close(self, now: float) -> bool:
        core = self._core
        waiting = (core.live & core.setting.receives) - self._done
        late = core.live - core.connected - {core.me}
        if self._reports is not None or self._inquiries or waiting or late:
            return False
        self._closed = True
        for member in sorted(core.live - {core.me}):
            if member in core.connected:
                core.send(member, Closed(), now)
        self._member.finish(now)
        return True
