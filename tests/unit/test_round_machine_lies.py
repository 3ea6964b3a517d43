"""A round's machine towards members that lie, or whose refusals say that they live: nobody waits for ever or ends alone."""

from __future__ import annotations

import pytest

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round import Round
from swarmavg.protocol.round_control import ControlBeat, Fence, LinkId, Probe, Report, Suspect, Term
from swarmavg.protocol.round_events import (
    ControlLost,
    ControlUp,
    LinkFailed,
    MessageCame,
    RoundSetting,
    Send,
    Tick,
)
from swarmavg.protocol.round_states import RoundState
from swarmavg.testing.round_world_members import PATIENCE, REQUEST_TIMEOUT


def machine_of(me, *, members=3):
    """The leader is member 0; each reduces one part, and nobody holds anything yet."""
    everybody = frozenset(range(members))
    machine = Round(
        RoundSetting(
            me=me,
            names=list("abcdef")[:members],
            salt=bytes(16),
            leader=0,
            serves=everybody,
            receives=everybody,
            owners=tuple(range(members)),
            request_timeout=REQUEST_TIMEOUT,
            patience=PATIENCE,
            holdings=lambda: 0,
            heard=lambda _member: False,
        )
    )
    for member in range(members):
        if member != me:
            machine.receive(ControlUp(member), 0.0)
    machine.drain_effects()
    return machine


def told(machine, kind):
    return [effect.to for effect in machine.drain_effects() if isinstance(effect, Send) and isinstance(effect.message, kind)]


def test_an_open_channel_that_is_lost_while_its_member_is_suspected_is_no_proof_of_death():
    leader = machine_of(0)
    for member in (1, 2):
        leader.receive(LinkFailed(LinkId(member, 0), member, ExclusionCode.CONNECTION_LOST, "it gave the channel up"), 1.0)
        leader.receive(ControlLost(member, ExclusionCode.CONNECTION_LOST, "it gave the channel up"), 1.0)
    assert leader.out == {}
    assert leader.state is RoundState.RUNNING
    assert told(leader, Probe).count(1) == 2  # on the channel that was open, and on a new one
    leader.receive(ControlLost(1, ExclusionCode.UNREACHABLE, "connection refused"), 1.01)
    leader.receive(ControlLost(2, ExclusionCode.UNREACHABLE, "connection refused"), 1.02)
    assert set(leader.out) == {1, 2}


def test_a_fence_that_this_member_is_said_to_have_made_is_a_violation():
    member = machine_of(1)
    with pytest.raises(RemoteProtocolError, match="has not made"):
        member.receive(MessageCame(2, Term(5, 1), Fence(out=(), severed=())), 1.0)
    assert member.term == Term(0, 0)


def test_terms_far_beyond_the_present_one_are_a_violation():
    member = machine_of(1)
    with pytest.raises(RemoteProtocolError, match="far beyond"):
        member.receive(MessageCame(2, Term(2**40, 2), Fence(out=(), severed=())), 1.0)
    member.receive(MessageCame(2, Term(2**40, 2), ControlBeat(missing=0)), 1.0)
    assert member.reports_to == 0


def test_members_that_obey_a_made_up_term_are_brought_together_by_whom_it_names():
    """c has told everybody of a term of b's, which b has not begun: reports arrive at b, who begins a higher one."""
    named = machine_of(1)
    named.receive(MessageCame(0, Term(7, 1), Report(committed=False, held=0)), 1.0)
    assert named.coordinates
    assert named.term == Term(8, 1)
    assert set(told(named, Fence)) == {0, 2}


def test_a_coordinator_that_lives_but_never_assigns_anything_is_replaced():
    member = machine_of(1)
    member.receive(MessageCame(2, Term(1, 2), Fence(out=(), severed=())), 1.0)
    assert member.state is RoundState.FROZEN
    deadline = member.next_deadline()
    assert deadline is not None
    assert deadline <= 1.0 + PATIENCE + 4 * REQUEST_TIMEOUT
    member.receive(MessageCame(2, Term(1, 2), ControlBeat(missing=0)), deadline - 0.1)  # it lives
    member.drain_effects()
    member.receive(Tick(), deadline)
    assert told(member, Suspect) == [0]
    assert member.reports_to == 0
