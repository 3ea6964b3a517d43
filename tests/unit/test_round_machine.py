"""One member's machine of a round, event by event, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmavg.errors import LocalProtocolError, RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round import Round
from swarmavg.protocol.round_control import (
    Ask,
    Assign,
    Closed,
    Done,
    Fence,
    Heard,
    LinkId,
    Probe,
    Report,
    Severed,
    Suspect,
    Term,
)
from swarmavg.protocol.round_events import (
    Acknowledged,
    CommitBegun,
    CommitEnded,
    ControlLost,
    ControlUp,
    Drop,
    HeldUp,
    Jobs,
    LeaveRound,
    LinkFailed,
    MessageCame,
    Open,
    RoundSetting,
    Send,
    Sever,
    Tick,
)
from swarmavg.protocol.round_jobs import Job
from swarmavg.protocol.round_states import TRANSITIONS, RoundCause, RoundState, round_diagram
from swarmavg.testing.round_world_members import PATIENCE, REQUEST_TIMEOUT

ROOT = Path(__file__).resolve().parents[2]


def setting(me=1, *, roles="nnn", leader=0, owners=(0, 1, 2), held=(0,)):
    """Members are named by letters. `held`: a list whose only item are the bits of the results held."""
    return RoundSetting(
        me=me,
        names=list("abcdef")[: len(roles)],
        salt=bytes(16),
        leader=leader,
        serves=frozenset(i for i, role in enumerate(roles) if role != "c"),
        receives=frozenset(i for i, role in enumerate(roles) if role != "a"),
        owners=owners,
        request_timeout=REQUEST_TIMEOUT,
        patience=PATIENCE,
        holdings=lambda: held[0],
        heard=lambda _member: False,
    )


def connected(machine, *members, now=0.0):
    for member in members:
        machine.receive(ControlUp(member), now)
    machine.drain_effects()
    return machine


def sent(machine):
    """Whom the machine tells what, without heartbeats and probes' answers."""
    return [(effect.to, effect.message) for effect in machine.drain_effects() if isinstance(effect, Send)]


def lost(member, code=ExclusionCode.CONNECTION_LOST):
    return ControlLost(member, code, "reset")


def fence(*out, severed=()):
    return Fence(out=tuple((member, ExclusionCode.SILENT, "no byte") for member in out), severed=tuple(severed))


def test_the_normal_course_is_two_messages_long():
    leader, follower = (Round(setting(me, roles="nn", owners=(0, 1), held=[3])) for me in (0, 1))
    assert follower.drain_effects() == [Open(0)]
    connected(leader, 1)
    connected(follower, 0)
    for machine in (leader, follower):
        assert not machine.may_commit  # nobody else has the results of its range
        machine.receive(Acknowledged(None), 0.1)
        assert machine.may_commit
        machine.receive(CommitBegun(), 0.2)
        machine.receive(CommitEnded(), 0.3)
        assert machine.state is RoundState.SERVING
    assert sent(follower) == [(0, Done())]
    leader.receive(MessageCame(1, Term(0, 0), Done()), 0.4)
    assert sent(leader) == [(1, Closed())]
    follower.receive(MessageCame(0, Term(0, 0), Closed()), 0.5)
    assert leader.state is follower.state is RoundState.CLOSED
    assert leader.next_deadline() is follower.next_deadline() is None


def test_a_member_that_answers_the_probe_stays_in_and_only_the_channel_is_over():
    leader = connected(Round(setting(0)), 1, 2)
    leader.receive(LinkFailed(LinkId(2, 0), 2, ExclusionCode.STALLED, "no progress"), 1.0)
    said = dict(sent(leader))
    assert said[1] == Ask(about=2)
    probe = said[2]
    assert isinstance(probe, Probe)
    alive = Round(setting(2))
    connected(alive, 0)
    alive.receive(MessageCame(0, Term(0, 0), probe), 1.1)
    ((_, answer),) = sent(alive)
    leader.receive(MessageCame(2, Term(0, 0), answer), 1.2)
    assert leader.out == {}
    assert leader.term == Term(1, 0)
    assert list(leader.severed) == [LinkId(2, 0)]
    assert leader.severed[LinkId(2, 0)].code is ExclusionCode.STALLED
    assert Sever(LinkId(2, 0)) in [effect for effect in leader.drain_effects() if isinstance(effect, Sever)]


def test_who_answers_neither_the_coordinator_nor_anybody_else_is_out_after_the_time_for_one_answer():
    leader = connected(Round(setting(0)), 1, 2)
    leader.receive(LinkFailed(LinkId(2, 0), 2, ExclusionCode.SILENT, "no byte"), 1.0)
    assert leader.next_deadline() == 1.0 + REQUEST_TIMEOUT
    leader.receive(Tick(), 1.0 + REQUEST_TIMEOUT)
    assert leader.out == {2: (ExclusionCode.SILENT, "no byte")}


def test_a_fence_freezes_the_commit_until_the_assignments_and_what_is_held_is_reported():
    held = [0b011]
    member = connected(Round(setting(roles="nnnn", owners=(0, 1, 2), held=held)), 0)
    member.receive(Acknowledged(None), 0.5)
    member.receive(MessageCame(0, Term(1, 0), fence(2)), 1.0)
    effects = member.drain_effects()
    assert effects[0] == Jobs(Term(1, 0), ())
    assert Drop(2, ExclusionCode.SILENT, "no byte") in effects
    assert [e.message for e in effects if isinstance(e, Send) and e.to == 0] == [Report(committed=False, held=0b011)]
    held[0] = 0b111
    assert not member.may_commit
    job = Job(number=0, server=3, holder=None, contributors=0b1011, consumers=0b0011, parts=(2,))
    member.receive(MessageCame(0, Term(1, 0), Assign(jobs=(job,))), 1.1)
    assert Jobs(Term(1, 0), (job,)) in member.drain_effects()
    assert member.may_commit
    assert member.live == {0, 1, 3}


def test_a_member_that_serves_a_job_commits_only_when_somebody_else_has_its_results():
    member = connected(Round(setting(owners=(0, 0, 2), held=[0b111])), 0)
    member.receive(MessageCame(0, Term(1, 0), fence(2)), 1.0)
    job = Job(number=0, server=1, holder=None, contributors=0b11, consumers=0b01, parts=(2,))
    member.receive(MessageCame(0, Term(1, 0), Assign(jobs=(job,))), 1.1)
    assert not member.may_commit
    member.receive(Acknowledged(0), 1.2)
    assert member.may_commit


def test_fenced_before_the_commit_it_fails_and_fenced_after_it_has_diverged():
    for committed, state in ((False, RoundState.FENCED), (True, RoundState.DIVERGED)):
        member = connected(Round(setting(held=[0b111])), 0)
        member.receive(Acknowledged(None), 0.1)
        if committed:
            member.receive(CommitBegun(), 0.2)
        member.receive(MessageCame(0, Term(1, 0), fence(1)), 1.0)
        assert member.state is state
        assert not member.may_commit
        assert "silent: no byte" in member.fenced_because


def test_when_the_coordinator_is_gone_the_next_takes_over_in_a_higher_term():
    member = connected(Round(setting(1)), 0, 2)
    member.receive(lost(0), 1.0)
    assert member.drain_effects()[0] == Open(0)  # perhaps only the channel was lost
    member.receive(lost(0, ExclusionCode.UNREACHABLE), 1.1)
    assert member.coordinates
    member.receive(lost(0, ExclusionCode.UNREACHABLE), 1.2)
    assert member.term == Term(1, 1)
    assert member.out.keys() == {0}
    fences = [(to, message) for to, message in sent(member) if isinstance(message, Fence)]
    assert [to for to, _ in fences] == [2]


def test_a_client_never_takes_over_and_is_orphaned_when_nobody_is_left_who_could():
    member = connected(Round(setting(1, roles="nc", owners=(0, 0))), 0)
    member.receive(lost(0), 1.0)
    member.receive(lost(0, ExclusionCode.UNREACHABLE), 1.1)
    assert member.state is RoundState.ORPHANED
    assert not member.coordinates


def test_who_is_out_and_speaks_all_the_same_is_told_so_once_on_each_channel():
    member = connected(Round(setting(1, roles="nnnn")), 0, 2)
    member.receive(MessageCame(0, Term(1, 0), fence(3)), 1.0)
    member.drain_effects()
    for _ in range(3):
        member.receive(MessageCame(3, Term(0, 0), Done()), 1.1)
    assert sent(member) == [(3, fence(3))]
    member.receive(ControlUp(3), 1.2)
    member.receive(MessageCame(3, Term(0, 0), Done()), 1.3)
    assert sent(member) == [(3, fence(3))]
    assert member.reports_to == 0


def test_of_two_coordinators_the_one_of_the_higher_term_is_obeyed_and_the_other_is_told():
    member = connected(Round(setting(2, roles="nnn")), 0, 1)
    member.receive(MessageCame(1, Term(1, 1), fence()), 1.0)
    assert member.reports_to == 1
    member.drain_effects()
    member.receive(MessageCame(0, Term(1, 0), Probe(serial=1)), 1.1)
    member.receive(MessageCame(0, Term(1, 0), fence(1)), 1.1)
    assert member.term == Term(1, 1)
    assert member.out == {}


def test_a_leaving_coordinator_tells_everybody_and_a_leaving_member_the_coordinator():
    leader, follower = connected(Round(setting(0)), 1, 2), connected(Round(setting(1)), 0, 2)
    leader.receive(LeaveRound("closed"), 1.0)
    follower.receive(LeaveRound("closed"), 1.0)
    assert [to for to, _ in sent(leader)] == [1, 2]
    assert [to for to, _ in sent(follower)] == [0]
    assert leader.state is follower.state is RoundState.LEFT


def test_a_coordinator_that_was_held_up_reads_the_reports_before_it_calls_anybody_silent():
    leader = connected(Round(setting(0, roles="nnnn")), 1, 2, 3)
    leader.receive(LinkFailed(LinkId(3, 0), 3, ExclusionCode.SILENT, "no byte"), 1.0)
    leader.receive(Tick(), 1.0 + REQUEST_TIMEOUT)
    leader.receive(MessageCame(1, Term(1, 0), Report(committed=False, held=0)), 2.1)
    leader.receive(HeldUp(30.0), 32.1)
    leader.receive(MessageCame(1, Term(1, 0), Done()), 32.1)
    leader.receive(MessageCame(2, Term(1, 0), Report(committed=False, held=0)), 32.1)
    assert leader.out.keys() == {3}
    assert leader.state is RoundState.RUNNING
    assert leader.term == Term(1, 0)


def test_done_from_a_member_that_turned_to_the_next_candidate_early_is_no_crime():
    """Its suspicion of the lost coordinator comes behind, on the same channel."""
    candidate = connected(Round(setting(1)), 2)
    candidate.receive(MessageCame(2, Term(0, 0), Done()), 1.0)
    suspicion = Suspect(accused=0, link=None, code=ExclusionCode.UNREACHABLE, detail="connection refused")
    candidate.receive(MessageCame(2, Term(0, 0), suspicion), 1.1)
    assert candidate.coordinates


def test_channels_that_an_earlier_coordinator_severed_are_told_to_one_who_does_not_know_it():
    severed = Severed(link=LinkId(2, 3), accused=3, code=ExclusionCode.STALLED, detail="no progress")
    member = connected(Round(setting(2, roles="nnnn")), 0, 1)
    member.receive(MessageCame(0, Term(1, 0), fence(severed=[severed])), 1.0)
    member.drain_effects()
    member.receive(MessageCame(1, Term(1, 1), fence(0)), 2.0)
    told = [message for to, message in sent(member) if to == 1 and isinstance(message, Suspect)]
    assert [(suspect.link, suspect.accused, suspect.code) for suspect in told] == [(LinkId(2, 3), 3, ExclusionCode.STALLED)]


@pytest.mark.parametrize(
    "message",
    [
        Suspect(accused=3, link=None, code=ExclusionCode.SILENT, detail=""),
        Suspect(accused=0, link=LinkId(0, 9), code=ExclusionCode.SILENT, detail=""),
        Fence(out=((7, ExclusionCode.SILENT, ""),), severed=()),
        Fence(out=(), severed=(Severed(link=LinkId(0, 5), accused=0, code=ExclusionCode.SILENT, detail=""),)),
        Report(committed=False, held=0b1000),
        Assign(jobs=(Job(number=0, server=3, holder=None, contributors=1, consumers=1, parts=(0,)),)),
        Assign(jobs=(Job(number=0, server=1, holder=4, contributors=0, consumers=1, parts=(0,)),)),
        Assign(jobs=(Job(number=0, server=1, holder=None, contributors=1, consumers=1, parts=(3,)),)),
    ],
    ids=repr,
)
def test_messages_about_members_or_parts_that_there_are_not_are_violations(message):
    member = connected(Round(setting(1)), 0, 2)
    with pytest.raises(RemoteProtocolError):
        member.receive(MessageCame(0, Term(0, 0), message), 1.0)


def test_who_does_not_coordinate_assigns_nothing():
    member = connected(Round(setting(1)), 0, 2)
    with pytest.raises(RemoteProtocolError, match="does not coordinate"):
        member.receive(MessageCame(2, Term(0, 0), Assign(jobs=())), 1.0)


def test_whom_somebody_else_hears_shall_be_kept_by_that_member():
    leader = connected(Round(setting(0)), 1, 2)
    leader.receive(LinkFailed(LinkId(2, 0), 2, ExclusionCode.SILENT, "no byte"), 1.0)
    leader.drain_effects()
    leader.receive(MessageCame(1, Term(0, 0), Heard(about=2)), 1.1)
    leader.receive(Tick(), 1.0 + REQUEST_TIMEOUT)
    ((to, message),) = sent(leader)
    assert leader.out == {}
    assert (to, message.accused, message.code) == (1, 0, ExclusionCode.SEVERED)


def test_a_fence_of_a_term_that_nobody_can_coordinate_is_a_violation():
    member = connected(Round(setting(1)), 0)
    with pytest.raises(RemoteProtocolError, match="no coordinator"):
        member.receive(MessageCame(0, Term(1, 7), fence()), 1.0)


def test_a_commit_that_is_not_allowed_is_a_bug_here():
    member = Round(setting(1, held=[0b111]))
    with pytest.raises(LocalProtocolError, match="does not allow"):
        member.receive(CommitBegun(), 0.0)


# ---- the table


def test_every_state_can_be_reached_and_no_end_is_left():
    assert set(TRANSITIONS.values()) == set(RoundState)
    assert not [state for state, _ in TRANSITIONS if state.over]
    for state in RoundState:
        if not state.over:
            assert (state, RoundCause.LEAVE) in TRANSITIONS
            assert (state, RoundCause.OUT) in TRANSITIONS
            assert (state, RoundCause.FENCE) in TRANSITIONS


def test_the_guarantees_show_the_diagram_of_the_table():
    page = (ROOT / "docs/explanation/guarantees.md").read_text()
    assert f"```mermaid\n{round_diagram()}\n```" in page
