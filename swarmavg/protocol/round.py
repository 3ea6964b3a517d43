"""One member's part in the control of a round, as a sans-IO machine: a dying peer costs time, never numbers.

Theory of operation. While nothing fails, the machine only counts who is done. A data channel that fails is final, and is
reported to the coordinator, who finds out whether the accused lives. Whatever it finds begins a new term: everybody stops
committing, drops what comes from those who are out, and reports which results it holds; then the coordinator assigns who
passes on or reduces anew what some still lack (`round_jobs`). Results that somebody holds are never computed again, and nobody
commits between its report and the assignments: that is why all members of the last term end with the same values.

A coordinator that is lost is replaced by the next member in the order of succession, in a higher term. Members obey the highest
term they have seen, and tell it to whoever still speaks of a lower one.

Use: `receive(event, now)`, then carry out `drain_effects()`, and deliver `Tick` at `next_deadline()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from swarmavg.errors import LocalProtocolError, RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import (
    Alive,
    Ask,
    Assign,
    Closed,
    ControlBeat,
    ControlMessage,
    Done,
    Fence,
    Fencing,
    Heard,
    Leave,
    LinkId,
    Probe,
    Report,
    Severed,
    Suspect,
    Term,
)
from swarmavg.protocol.round_coordinator import Coordinator
from swarmavg.protocol.round_core import RoundCore
from swarmavg.protocol.round_events import (
    Acknowledged,
    CommitBegun,
    CommitEnded,
    ControlLost,
    ControlMissing,
    ControlUp,
    Drop,
    HeldUp,
    Jobs,
    LeaveRound,
    LinkFailed,
    MemberLeft,
    MessageCame,
    Open,
    RoundEffect,
    RoundEvent,
    RoundSetting,
    Send,
    Sever,
    TermSeen,
    Tick,
)
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_states import RoundCause, RoundState
from swarmavg.protocol.round_words import in_words

_MAX_PASSES: Final = 10_000
_STEPS_OF_A_TERM: Final = 4
"""Request timeouts that a coordinator needs at most beyond the patience: a call, an answer, its reports, its assignments."""
_LONGEST_JUMP: Final = 1000
"""Terms that one member may have missed: more were made up."""


class Round:
    """The machine of one member in one round."""

    def __init__(self, setting: RoundSetting) -> None:
        self._core = core = RoundCore(setting)
        self._coordinator = Coordinator(core, self, active=core.coordinator == core.me)
        self._target = core.coordinator
        """To whom this member reports: the coordinator, or who should take over from it."""
        self._failed: set[int] = set()
        """Coordinators and candidates that this member could not reach in this term."""
        self._redialled: float | None = None
        self._suspicions: dict[tuple[int, LinkId | None], Suspect] = {}
        """Not settled yet: told again to the next coordinator."""
        self._jobs: tuple[Job, ...] = ()
        self._acknowledged: set[int | None] = set()
        self._done = False
        self._frozen_at = 0.0
        self._alarm: float | None = None
        self.fenced_because = ""
        if self._target != core.me:
            core.effects.append(Open(self._target))

    # For the driver

    @property
    def state(self) -> RoundState:
        return self._core.state

    @property
    def term(self) -> Term:
        return self._core.term

    @property
    def out(self) -> Mapping[int, tuple[ExclusionCode, str]]:
        """Members that the present term goes on without, and why."""
        return self._core.out

    @property
    def suspected(self) -> Mapping[int, tuple[ExclusionCode, str]]:
        """Members that this one cannot work with and of whom no coordinator has decided yet, and why."""
        return {accused: (s.code, s.detail) for (accused, _), s in reversed(self._suspicions.items())}

    @property
    def live(self) -> frozenset[int]:
        return self._core.live

    @property
    def reports_to(self) -> int:
        """The coordinator as this member sees it."""
        return self._target

    @property
    def coordinates(self) -> bool:
        return self._coordinator.active

    @property
    def severed(self) -> Mapping[LinkId, Severed]:
        """Data channels whose two ends live but cannot work with each other."""
        return self._core.severed

    def unconnected(self) -> frozenset[int]:
        """Live members without a control channel to this one."""
        core = self._core
        return core.live - core.connected - {core.me}

    @property
    def fencing(self) -> Fencing:
        """For members that this one goes on without."""
        return Fencing(self._core.term, sum(1 << member for member in self._core.live))

    @property
    def may_commit(self) -> bool:
        """Every result is held, no fence is pending, and somebody else has what this member alone could lose."""
        core = self._core
        return (
            core.state is RoundState.RUNNING
            and core.me in core.setting.receives
            and core.setting.holdings() == core.everything
            and all(key in self._acknowledged for key in self._to_acknowledge())
        )

    def next_deadline(self) -> float | None:
        """When `Tick` is due if nothing happens before."""
        return self._alarm

    def drain_effects(self) -> list[RoundEffect]:
        """What is to be done, in order. Each effect is handed out once."""
        effects = self._core.effects[:]
        self._core.effects.clear()
        return effects

    def story(self) -> list[str]:
        """What happened so far, a line each, with the time of the loop's clock."""
        return list(self._core.story)

    def note(self, now: float, line: str) -> None:
        """Add to the story what happens outside the machine."""
        self._core.tell(now, line)

    def validate(self) -> None:
        """Raise `LocalProtocolError` if the machine contradicts itself. For tests."""
        core = self._core
        problems = [
            core.me in core.out and core.state not in (RoundState.FENCED, RoundState.DIVERGED, RoundState.LEFT),
            core.coordinator in core.out and not core.state.over,
            self._coordinator.active and self._target != core.me and not core.state.over,
            any(link.contributor == link.reducer for link in core.severed),
            core.state is RoundState.SERVING and core.setting.holdings() != core.everything,
            self._target in core.out and not core.state.over,
        ]
        if any(problems):
            raise LocalProtocolError(f"round invariant {problems.index(True)} broken:\n" + "\n".join(core.story[-30:]))

    def receive(self, event: RoundEvent, now: float) -> None:
        """Take in what happened. Raises `LocalProtocolError` for a command that the state does not allow, and
        `RemoteProtocolError` for a message that names members or parts which the round does not have.
        """
        if not self.state.over:
            match event:
                case MessageCame():
                    self._take_message(event.sender, event.term, event.message, now)
                case ControlUp():
                    self._up(event.member, now)
                case ControlLost():
                    self._control_lost(event, now)
                case ControlMissing():
                    if self._core.coordinator == self._core.me and event.member not in self._core.connected:
                        code = ExclusionCode.NEVER_ARRIVED
                        self._coordinator.suspect(Suspect(accused=event.member, link=None, code=code, detail=event.detail), now)
                case LinkFailed():
                    self._suspect(Suspect(accused=event.accused, link=event.link, code=event.code, detail=event.detail), now)
                case MemberLeft():
                    left = Suspect(
                        accused=event.member, link=None, code=ExclusionCode.CANCELLED, detail=event.reason, left=True
                    )
                    self._suspect(left, now)
                case TermSeen():
                    self._chase(event.term, event.sender, now)
                case _:
                    self._local(event, now)
        elif isinstance(event, MessageCame):
            self._answer_after_the_end(event, now)
        elif isinstance(event, ControlLost | ControlUp):
            (self._core.connected.add if isinstance(event, ControlUp) else self._core.connected.discard)(event.member)
        self._settle(now)

    # Time

    def _settle(self, now: float) -> None:
        for _ in range(_MAX_PASSES):
            alarms: list[float] = []
            if self.state.over or not (self._expire_frozen(now, alarms) or self._coordinator.expire(now, alarms)):
                self._alarm = min((alarm for alarm in alarms if alarm > now), default=None)
                return
        raise LocalProtocolError("a round does not come to rest:\n" + "\n".join(self.story()[-20:]))

    def _expire_frozen(self, now: float, alarms: list[float]) -> bool:
        """A coordinator that lives but never assigns anything is replaced as one that is lost."""
        core = self._core
        if not core.state.frozen or self._target == core.me:
            return False
        deadline = self._frozen_at + core.setting.patience + _STEPS_OF_A_TERM * core.setting.request_timeout
        if now < deadline:
            alarms.append(deadline)
            return False
        self._frozen_at = now
        silent = Suspect(accused=self._target, link=None, code=ExclusionCode.STALLED, detail="no assignments came from it")
        self._suspicions[self._target, None] = silent
        self._replace_target(now)
        return True

    # Local events

    def _local(self, event: RoundEvent, now: float) -> None:
        core = self._core
        match event:
            case Acknowledged():
                self._acknowledged.add(event.job)
            case CommitBegun():
                if not self.may_commit:
                    raise LocalProtocolError("a commit while the round does not allow it")
                core.move(RoundCause.COMMIT, now)
            case CommitEnded():
                self._done = True
                self._tell_coordinator(Done(), now)
            case LeaveRound():
                for member in sorted(core.connected if self._coordinator.active else {self._target} & core.connected):
                    core.send(member, Leave(reason=event.reason), now)
                core.move(RoundCause.LEAVE, now)
            case HeldUp():
                core.tell(now, f"this process was held up for {event.seconds:.1f} s")
                self._coordinator.forgive(event.seconds)
                self._frozen_at += event.seconds
            case Tick():
                pass
            case _:
                raise LocalProtocolError(f"{event!r} is no event of a round")

    def _to_acknowledge(self) -> set[int | None]:
        """The own range and the jobs served here, as far as others fetch them."""
        core = self._core
        others = core.live & core.setting.receives - {core.me}
        keys: set[int | None] = set()
        if core.me in core.setting.owners and any((member, core.me) not in core.severed for member in others):
            keys.add(None)
        for job in self._jobs:
            if job.server == core.me and job.consumers & ~(1 << core.me):
                keys.add(job.number)
        return keys

    # Suspicions

    def _suspect(self, suspicion: Suspect, now: float) -> None:
        core = self._core
        if suspicion.accused in core.out or suspicion.accused == core.me or suspicion.link in core.severed:
            return
        if (suspicion.accused, suspicion.link) in self._suspicions:
            return
        self._suspicions[suspicion.accused, suspicion.link] = suspicion
        if self._target == core.me:
            core.tell(now, in_words(suspicion, core.setting))
        if suspicion.accused == self._target and (suspicion.left or suspicion.link is None):
            self._replace_target(now)
        else:
            self._tell_coordinator(suspicion, now)

    def _tell_coordinator(self, message: ControlMessage, now: float) -> None:
        if self._target != self._core.me:
            self._core.send(self._target, message, now)
            return
        match message:
            case Suspect():
                self._coordinator.suspect(message, now)
            case Report():
                self._coordinator.report(self._core.me, message, now)
            case Done():
                self._coordinator.done(self._core.me)

    # Control channels

    def _up(self, member: int, now: float) -> None:
        core = self._core
        core.connected.add(member)
        core.told.discard(member)
        if member in core.out:
            core.repeat_fence(member, now)
        elif self._coordinator.active:
            self._coordinator.up(member, now)
        if member == self._target:
            self._tell_state(now)

    def _tell_state(self, now: float) -> None:
        """What a coordinator must know about this member, who comes to it for the first time or again."""
        core = self._core
        for suspicion in self._suspicions.values():
            core.send(self._target, suspicion, now)
        if core.state.frozen:
            core.send(self._target, self._report(), now)
        elif self._done:
            core.send(self._target, Done(), now)
        else:
            core.send(self._target, ControlBeat(missing=self._missing()), now)

    def _control_lost(self, event: ControlLost, now: float) -> None:
        core = self._core
        core.connected.discard(event.member)
        core.tell(now, f"lost {core.name(event.member)}: {event.code.value}, {event.detail}")
        if event.fenced_by is not None:
            theirs = frozenset(p for p in range(len(core.setting.names)) if event.fenced_by.live >> p & 1)
            if self._outnumbered(theirs, event.fenced_by.term):
                self._out(event.detail, now)
                return
        if event.closed:
            self._learn_end(now)
            return
        if self._coordinator.active:
            if event.code is ExclusionCode.CANCELLED:
                self._coordinator.left(event.member, event.detail)
            else:
                self._coordinator.lost(event.member, event.code, event.detail, now)
        if event.member != self._target:
            return
        fresh = self._redialled is None or now - self._redialled > core.setting.request_timeout
        if fresh and event.code not in (ExclusionCode.CANCELLED, ExclusionCode.SILENT, ExclusionCode.UNREACHABLE):
            self._redialled = now
            core.effects.append(Open(event.member))
        else:
            detail = Suspect(accused=event.member, link=None, code=event.code, detail=event.detail)
            self._suspicions.setdefault((event.member, None), detail)
            self._replace_target(now)

    def _replace_target(self, now: float) -> None:
        """The coordinator, or who should have taken over, cannot be reached: turn to the next."""
        core = self._core
        self._failed.add(self._target)
        for candidate in core.succession:
            if candidate in core.out or candidate in self._failed:
                continue
            self._target = candidate
            if candidate == core.me:
                self._coordinator.take_over(now)
                for suspicion in self._suspicions.values():
                    self._coordinator.suspect(suspicion, now)
            else:
                core.tell(now, f"I turn to {core.name(candidate)}")
                core.effects.append(Open(candidate))
                if candidate in core.connected:
                    self._tell_state(now)
            return
        core.move(RoundCause.ORPHAN, now)

    # Messages

    def _take_message(self, sender: int, term: Term, message: ControlMessage, now: float) -> None:
        core = self._core
        self._check(message, sender)
        if not isinstance(message, ControlBeat):
            core.tell(now, f"from {core.name(sender)}: {in_words(message, core.setting)}")
        if isinstance(message, Fence):
            self._take_fence(sender, message, term, now)
            return
        if sender in core.out:
            core.repeat_fence(sender, now)
            return
        if not self._about_liveness(sender, message, now):
            if term > core.term:
                self._chase(term, sender, now)
            elif term < core.term:
                core.repeat_fence(sender, now)
            else:
                self._in_this_term(sender, message, now)

    def _take_fence(self, sender: int, fence: Fence, term: Term, now: float) -> None:
        """Obey the higher term; but where each side has fenced the other, the larger side is right, wherever it was heard."""
        core = self._core
        self._check_term(term, sender)
        theirs = frozenset(range(len(core.setting.names))) - {member for member, _, _ in fence.out}
        excluded = core.me not in theirs
        if core.succession[term.rank] in core.out or (sender in core.out and excluded):
            if excluded and self._outnumbered(theirs, term):
                self._out("the larger part of the group", now)
            else:
                core.repeat_fence(sender, now)
        elif term > core.term:
            self.obey(fence, term, now)

    def _check_term(self, term: Term, sender: int) -> None:
        """Raise `RemoteProtocolError` for a fence that nobody can have sent."""
        core = self._core
        if term.rank >= len(core.succession):
            raise RemoteProtocolError(f"a fence of term {term}, for which there is no coordinator")
        if term > core.term and core.succession[term.rank] == core.me:
            raise RemoteProtocolError(f"{core.name(sender)} brings a fence of this member that it has not made")
        if term.number > core.term.number + _LONGEST_JUMP:
            raise RemoteProtocolError(f"{core.name(sender)} speaks of term {term}, far beyond {core.term}")

    def _outnumbered(self, theirs: frozenset[int], term: Term) -> bool:
        """Whether those who go on without this member are more than those who are left with it."""
        core = self._core
        return (len(theirs), term) > (len(core.live - theirs), core.term)

    def _check(self, message: ControlMessage, sender: int) -> None:
        """Raise `RemoteProtocolError` if it names members or parts that there are not."""
        core, count = self._core, len(self._core.setting.names)
        match message:
            case Suspect():
                positions = {message.accused, *(message.link or ())}
            case Ask() | Heard():
                positions = {message.about}
            case Fence():
                positions = {entry[0] for entry in message.out} | {p for s in message.severed for p in (s.accused, *s.link)}
            case Assign():
                positions = {job.server for job in message.jobs} | {job.holder or 0 for job in message.jobs}
                if any(job.parts and job.parts[-1] >= len(core.setting.owners) for job in message.jobs):
                    raise RemoteProtocolError("assignments of parts that the plan does not have")
            case Report():
                positions = set()
                if message.held & ~core.everything:
                    raise RemoteProtocolError("a report of parts that the plan does not have")
            case _:
                positions = set()
        if any(position >= count for position in positions):
            raise RemoteProtocolError(f"{type(message).__name__} of {core.name(sender)} names a member that there is not")

    def _about_liveness(self, sender: int, message: ControlMessage, now: float) -> bool:
        """Messages that mean the same in every term."""
        core = self._core
        match message:
            case Probe():
                core.send(sender, Alive(serial=message.serial), now)
            case Alive():
                self._coordinator.alive(sender, message)
            case Ask():
                if core.setting.heard(message.about):
                    core.send(sender, Heard(about=message.about), now)
            case Heard():
                self._coordinator.heard(sender, message)
            case Leave():
                self._member_left(sender, message.reason, now)
            case Closed():
                self._learn_end(now)
            case _:
                return False
        return True

    def _member_left(self, member: int, reason: str, now: float) -> None:
        if self._coordinator.active:
            self._coordinator.left(member, reason)
        elif member == self._target:
            self._suspicions.pop((member, None), None)
            gone = Suspect(accused=member, link=None, code=ExclusionCode.CANCELLED, detail=reason, left=True)
            self._suspect(gone, now)

    def _in_this_term(self, sender: int, message: ControlMessage, now: float) -> None:
        core = self._core
        match message:
            case Suspect():
                self._take_suspicion(message, now)
            case Report() | Done() if not self._coordinator.active:
                pass  # it turns to this member, and will say why
            case Report():
                self._coordinator.report(sender, message, now)
            case Done():
                self._coordinator.done(sender)
            case Assign() if sender == core.coordinator:
                self.take_up(message, now)
            case ControlBeat():
                pass
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from {core.name(sender)}, who does not coordinate")

    def _take_suspicion(self, message: Suspect, now: float) -> None:
        """As the coordinator, or as the one who should take over from it."""
        core = self._core
        if not self._coordinator.active:
            if message.accused != core.coordinator and core.coordinator not in self._failed:
                return  # told to the wrong member; it will find out, and tell the right one
            self._failed.add(core.coordinator)
            self._target = core.me
            self._coordinator.take_over(now)
            for own in self._suspicions.values():
                self._coordinator.suspect(own, now)
        self._coordinator.suspect(message, now)

    def _chase(self, term: Term, sender: int, now: float) -> None:
        """Somebody speaks of a higher term: its coordinator will tell the rest."""
        core = self._core
        if term <= core.term or term.rank >= len(core.succession) or term.number > core.term.number + _LONGEST_JUMP:
            return
        coordinator = core.succession[term.rank]
        if coordinator == core.me:
            core.tell(now, f"{core.name(sender)} speaks of term {term}, which this member has not begun")
            self._target = core.me
            self._coordinator.outbid(term.number, now)
        if coordinator in (core.me, self._target):
            return
        core.tell(now, f"{core.name(sender)} speaks of term {term}: I turn to {core.name(coordinator)}")
        self._target = coordinator
        self._coordinator.give_way()
        core.effects.append(Open(coordinator))
        if coordinator in core.connected:
            self._tell_state(now)

    def _answer_after_the_end(self, event: MessageCame, now: float) -> None:
        """Members that missed the end are told how it ended."""
        core = self._core
        if isinstance(event.message, Closed | Fence | Leave):
            return
        if core.state is RoundState.CLOSED and event.sender not in core.out:
            core.send(event.sender, Closed(), now)
        elif core.state in (RoundState.CLOSED, RoundState.ORPHANED) and event.term <= core.term:
            core.send(event.sender, core.fence, now)

    # What the coordinator decides

    def obey(self, fence: Fence, term: Term, now: float) -> None:
        """A new term begins."""
        core = self._core
        earlier, severed = set(core.out), dict(core.severed)
        core.term, core.fence = term, fence
        core.told.clear()
        core.out = {member: (code, detail) for member, code, detail in fence.out}
        core.severed = {severed.link: severed for severed in fence.severed}
        self._target = core.coordinator
        self._failed.clear()
        self._redialled = None
        if core.coordinator != core.me:
            self._pass_along(fence, now)
            self._coordinator.give_way()
        if core.me in core.out:
            code, detail = core.out[core.me]
            self._out(f"{code.value}: {detail}", now)
            return
        core.effects.append(Jobs(term, ()))  # first: nothing of an earlier term may become held after the report
        for member in sorted(core.out.keys() - earlier):
            core.effects.append(Drop(member, *core.out[member]))
            if member in core.connected:
                core.repeat_fence(member, now)  # the coordinator may not reach it
        core.effects += [Sever(link) for link in sorted(core.severed.keys() - severed.keys())]
        self._jobs = ()
        self._acknowledged &= {None}
        self._suspicions = {
            key: suspicion
            for key, suspicion in self._suspicions.items()
            if suspicion.accused not in core.out and suspicion.link not in core.severed and suspicion.link is not None
        }
        self._suspect_again(severed)
        core.move(RoundCause.FENCE, now)
        self._frozen_at = now
        if core.coordinator == core.me:
            self._coordinator.report(core.me, self._report(), now)
        elif core.coordinator in core.connected:
            self._tell_state(now)
        else:
            core.effects.append(Open(core.coordinator))
        if core.coordinator == core.me:
            for suspicion in self._suspicions.values():
                self._coordinator.suspect(suspicion, now)

    def _suspect_again(self, before: Mapping[LinkId, Severed]) -> None:
        """Channels of this member that failed in an earlier term, of which the new coordinator has not heard."""
        core = self._core
        for link, severed in before.items():
            if link not in core.severed and core.me in link and core.out.keys().isdisjoint(link):
                other = link.reducer if link.contributor == core.me else link.contributor
                again = Suspect(accused=other, link=link, code=severed.code, detail=severed.detail)
                self._suspicions[other, link] = again

    def _pass_along(self, fence: Fence, now: float) -> None:
        """A coordinator that is replaced tells those who only know it."""
        core = self._core
        if self._coordinator.active:
            for member in sorted(core.connected - {core.coordinator}):
                core.send(member, fence, now)

    def take_up(self, message: Assign, now: float) -> None:
        """Reports are in, and this is what remains to be done."""
        core = self._core
        if not core.state.frozen:
            return  # said twice
        self._jobs = message.jobs
        core.move(RoundCause.ASSIGN, now)
        core.effects.append(Jobs(core.term, message.jobs))
        if self._done:
            self._tell_coordinator(Done(), now)

    def resign(self, now: float) -> None:
        self._out("too many members cannot work with this one", now)

    def _learn_end(self, now: float) -> None:
        """Everybody who belongs to the round has everything."""
        if self.state.committed or self._core.me not in self._core.setting.receives:
            self.finish(now)
        else:
            self._out("the round was closed without this member", now)

    def finish(self, now: float) -> None:
        if self.state.committed or self._core.me not in self._core.setting.receives:
            if self.state.frozen:
                self._core.move(RoundCause.ASSIGN, now)
            self._core.move(RoundCause.CLOSE, now)

    def _out(self, detail: str, now: float) -> None:
        core = self._core
        self.fenced_because = detail
        core.tell(now, f"the others go on without this member: {detail}")
        core.move(RoundCause.OUT, now)

    # Small things

    def beat(self) -> None:
        """Say that this member lives, on every control channel."""
        for member in sorted(self._core.connected - self._core.out.keys()):
            self._core.effects.append(Send(member, self._core.term, ControlBeat(missing=self._missing())))

    def _missing(self) -> int:
        return len(self._core.setting.owners) - self._core.setting.holdings().bit_count()

    def _report(self) -> Report:
        """An auxiliary peer holds nothing for itself."""
        core = self._core
        return Report(committed=core.state.committed, held=core.setting.holdings())
