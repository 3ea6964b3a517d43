"""What averagers put on the wire: presences, messages, begins; and that nothing else is let in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GroupId, PeerId
from swarmavg.protocol.group import Group, Member, Role
from swarmavg.protocol.matchmaking_begin import read_begin, sign_begin
from swarmavg.protocol.matchmaking_messages import (
    MAX_GATHER_BYTES,
    Accepted,
    Alive,
    Begin,
    Candidate,
    Join,
    Leave,
    MatchMessage,
    Probe,
    Redirect,
    Refuse,
    Rejected,
    Released,
    Renew,
    decode_message,
    encode_message,
    payload_limit,
)
from swarmavg.protocol.matchmaking_presence import MatchConfig, Phase, Presence, decode_presence
from swarmavg.testing.matchmaking_world import fake_signer
from swarmavg.transport.packing import pack, unpack

PEERS = st.binary(min_size=32, max_size=32).map(PeerId)
NONCES = st.binary(min_size=16, max_size=16)
SECONDS = st.floats(0, 1e6)
COUNTS = st.integers(0, 1 << 40)
CANDIDATES = st.lists(
    st.builds(Candidate, PEERS, st.sampled_from(Role), st.binary(min_size=8, max_size=8), COUNTS, st.none() | SECONDS),
    max_size=3,
).map(tuple)
PRESENCES = st.builds(
    Presence,
    role=st.sampled_from(Role),
    phase=st.sampled_from(Phase),
    bits=st.text("01", max_size=8),
    config_hash=st.binary(min_size=32, max_size=32),
    config_digests=st.lists(st.tuples(st.text(max_size=10), st.binary(min_size=4, max_size=4)), max_size=3).map(tuple),
    attempt=COUNTS,
    due_in=st.none() | SECONDS,
    incarnation=st.binary(min_size=8, max_size=8),
    serial=COUNTS,
    follows=st.none() | PEERS,
)
MESSAGES: st.SearchStrategy[MatchMessage] = st.one_of(
    st.builds(
        Join,
        nonce=NONCES,
        min_group_size=st.integers(1, 100),
        window=SECONDS,
        deadline=st.none() | SECONDS,
        starts_in=SECONDS,
        bandwidth=st.none() | SECONDS,
        gather=st.binary(max_size=50),
        final=st.booleans(),
        avoid=st.lists(PEERS, max_size=3).map(tuple),
        candidates=CANDIDATES,
    ),
    st.builds(Renew, nonce=NONCES, window=SECONDS, deadline=st.none() | SECONDS, candidates=CANDIDATES),
    st.builds(Accepted, nonce=NONCES, candidates=CANDIDATES),
    st.builds(Redirect, nonce=NONCES, to=PEERS, candidates=CANDIDATES),
    st.builds(Rejected, nonce=NONCES, code=st.just("full"), reason=st.text(max_size=50), candidates=CANDIDATES),
    st.builds(Released, nonce=NONCES, candidates=CANDIDATES),
    st.builds(Leave, nonce=NONCES, reason=st.text(max_size=50)),
    st.builds(Begin, signed=st.binary(max_size=100)),
    st.builds(Refuse, group_id=st.binary(min_size=16, max_size=16).map(GroupId), reason=st.text(max_size=50)),
    st.just(Probe()),
    st.just(Alive()),
)


@given(PRESENCES, MESSAGES)
@settings(max_examples=150, deadline=None)
def test_messages_come_back_as_they_went(presence: Presence, message: MatchMessage) -> None:
    header, payload = encode_message(presence, message)
    assert decode_message(header, payload) == (presence, message)
    assert len(payload) <= payload_limit(header)


@given(st.binary(max_size=100), st.binary(max_size=20))
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_are_a_remote_error(header: bytes, payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(header, payload)
    with pytest.raises(RemoteProtocolError):
        decode_presence(header)


VALUES = st.none() | st.booleans() | st.integers(-5, 1 << 60) | st.floats() | st.text(max_size=3) | st.binary(max_size=40)


@given(PRESENCES, MESSAGES, VALUES | st.lists(VALUES, max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_a_message_with_one_changed_field_is_read_or_refused(
    presence: Presence, message: MatchMessage, junk: Any, data: Any
) -> None:
    header, payload = encode_message(presence, message)
    kind, described, fields = unpack(header, what="test")
    if fields and data.draw(st.booleans()):
        fields[data.draw(st.sampled_from(sorted(fields)))] = junk
    else:
        inner = unpack(described, what="test")
        inner[data.draw(st.sampled_from(sorted(inner)))] = junk
        described = pack(inner)
    with suppress(RemoteProtocolError):  # any other error fails the test
        decode_message(pack([kind, described, fields]), payload)


def a_presence(**changes: Any) -> Presence:
    presence = Presence(role=Role.NODE, phase=Phase.IDLE, bits="", config_hash=b"c" * 32, incarnation=b"i" * 8, serial=1)
    return replace(presence, **changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("role", "boss"),
        ("phase", "asleep"),
        ("bits", "012"),
        ("bits", "0" * 257),
        ("config", b"short"),
        ("due", -1.0),
        ("due", float("nan")),
        ("due", float("inf")),
        ("serial", -1),
        ("serial", True),
        ("inc", b""),
        ("v", [1]),
        ("fields", [["name", b"long digest"]]),
        ("follows", b"x"),
    ],
)
def test_bad_presences_are_refused(key: str, value: Any) -> None:
    fields = unpack(a_presence().encode(), what="test")
    fields[key] = value
    with pytest.raises(RemoteProtocolError, match="malformed presence"):
        decode_presence(pack(fields))


def test_keys_of_later_versions_are_ignored() -> None:
    fields = unpack(a_presence().encode(), what="test")
    fields["mood"] = "good"
    assert decode_presence(pack(fields)) == a_presence()


def test_a_gathered_value_that_is_too_large_is_refused() -> None:
    join = Join(
        nonce=b"n" * 16,
        min_group_size=2,
        window=1.0,
        deadline=None,
        starts_in=0.0,
        bandwidth=None,
        gather=b"x" * (MAX_GATHER_BYTES + 1),
        final=False,
        avoid=(),
    )
    with pytest.raises(RemoteProtocolError, match="at most 65536"):
        decode_message(*encode_message(a_presence(), join))


# ---- configuration


def test_the_first_difference_is_named_in_the_order_of_the_fields() -> None:
    ours = MatchConfig((("shapes", "a"), ("compression", "none"), ("mode", "average")))
    theirs = MatchConfig((("shapes", "a"), ("compression", "float16"), ("mode", "difference")))
    assert ours.hash != theirs.hash
    assert ours.first_difference(theirs.digests) == "'compression' (ours: none)"
    assert ours.first_difference(ours.digests[:1]) == "'compression' (ours: none)"
    assert MatchConfig(ours.fields[:2]).first_difference(ours.digests) == "'mode' (which we do not have)"


@pytest.mark.parametrize("fields", [(("a", "1"), ("a", "2")), (("", "1"),), (("x" * 41, "1"),)])
def test_bad_configurations_are_refused(fields: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        MatchConfig(fields)


# ---- begins

LEADER = fake_signer(b"leader")
ME = PeerId.from_public_key(b"leader")


def a_begin(**changes: Any) -> Group:
    others = [PeerId.from_public_key(b"other %d" % index) for index in range(2)]
    members = tuple(
        Member(peer_id=peer, nonce=bytes([index]) * 16, role=Role.NODE, bandwidth=None, gather=b"\xc0")
        for index, peer in enumerate([others[0], ME, others[1]])
    )
    values: dict[str, Any] = {
        "group_id": GroupId(b"g" * 16),
        "leader": ME,
        "members": members,
        "bits": "01",
        "plan_hash": b"p" * 32,
        "prefix": "run",
        "config_hash": b"c" * 32,
        "signer": LEADER,
        **changes,
    }
    return sign_begin(**values)


def read(signed: bytes, **changes: Any) -> Group:
    values: dict[str, Any] = {"prefix": "run", "config_hash": b"c" * 32, "signer": fake_signer(b"reader"), **changes}
    return read_begin(signed, **values)


def test_a_begin_is_read_as_it_was_signed() -> None:
    assert read(a_begin().signed) == a_begin()


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_no_byte_of_a_begin_can_be_changed(position: int, change: int) -> None:
    signed = bytearray(a_begin().signed)
    signed[position % len(signed)] ^= change
    with pytest.raises(RemoteProtocolError):
        read(bytes(signed))


@pytest.mark.parametrize(
    ("changes", "reading", "problem"),
    [
        ({"signer": fake_signer(b"mallory")}, {}, "another peer's"),
        ({"prefix": "walk"}, {}, "another run or configuration"),
        ({"config_hash": b"d" * 32}, {}, "another run or configuration"),
        ({}, {"signer": replace(fake_signer(b"reader"), accepted_swarm_ids=(b"t" * 32,))}, "signature does not fit"),
        ({"members": ()}, {}, "members must be a list"),
        ({"members": a_begin().members + a_begin().members[:1]}, {}, "appears twice"),
        ({"members": a_begin().members[:1]}, {}, "not a member that can lead"),
        ({"members": tuple(replace(m, role=Role.CLIENT) for m in a_begin().members)}, {}, "not a member that can lead"),
    ],
)
def test_bad_begins_are_refused(changes: dict[str, Any], reading: dict[str, Any], problem: str) -> None:
    with pytest.raises(RemoteProtocolError, match=problem):
        read(a_begin(**changes).signed, **reading)
