"""Control messages of a round: each survives the wire, and nothing else does."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import RemoteProtocolError
from swarmavg.protocol.outcome import ExclusionCode
from swarmavg.protocol.round_control import (
    MAX_DETAIL,
    MAX_JOBS_PER_PART,
    MAX_MEMBERS,
    MAX_PARTS,
    Alive,
    Ask,
    Assign,
    Closed,
    ControlBeat,
    Done,
    Fence,
    Heard,
    Leave,
    LinkId,
    Probe,
    Report,
    Severed,
    Suspect,
    Term,
    decode_control,
    encode_control,
)
from swarmavg.protocol.round_jobs import Job
from swarmavg.transport.packing import pack

POSITIONS = st.integers(0, MAX_MEMBERS - 1)
SERIALS = st.integers(0, (1 << 48) - 1)
CODES = st.sampled_from(ExclusionCode)
TEXTS = st.text(max_size=MAX_DETAIL)
LINKS = st.builds(LinkId, POSITIONS, POSITIONS)
TERMS = st.builds(Term, SERIALS, SERIALS)
MEMBER_SETS = st.integers(0, (1 << MAX_MEMBERS) - 1)
PART_NUMBERS = st.sets(st.integers(0, MAX_PARTS - 1) | st.integers(0, 20), max_size=12).map(lambda found: tuple(sorted(found)))


@st.composite
def assignments(draw):
    count = draw(st.integers(0, 4))
    return Assign(
        jobs=tuple(
            Job(
                number=number,
                server=draw(POSITIONS),
                holder=draw(st.none() | POSITIONS),
                contributors=draw(MEMBER_SETS),
                consumers=draw(MEMBER_SETS),
                parts=draw(PART_NUMBERS),
            )
            for number in range(count)
        )
    )


MESSAGES = st.one_of(
    st.builds(Suspect, accused=POSITIONS, link=st.none() | LINKS, code=CODES, detail=TEXTS, left=st.booleans()),
    st.builds(Probe, serial=SERIALS),
    st.builds(Alive, serial=SERIALS),
    st.builds(Ask, about=POSITIONS),
    st.builds(Heard, about=POSITIONS),
    st.builds(
        Fence,
        out=st.lists(st.tuples(POSITIONS, CODES, TEXTS), max_size=4).map(tuple),
        severed=st.lists(st.builds(Severed, link=LINKS, accused=POSITIONS, code=CODES, detail=TEXTS), max_size=4).map(tuple),
    ),
    st.builds(Report, committed=st.booleans(), held=st.integers(0, (1 << 300) - 1)),
    assignments(),
    st.just(Done()),
    st.just(Closed()),
    st.builds(Leave, reason=TEXTS),
    st.builds(ControlBeat, missing=SERIALS),
)


@settings(max_examples=400, deadline=None)
@given(TERMS, MESSAGES)
def test_every_message_survives_the_wire_with_its_term(term, message):
    header, payload = encode_control(term, message)
    read_term, read = decode_control(header, memoryview(payload))
    assert (read_term, read) == (term, message)
    if isinstance(message, Fence):  # whose particulars do not count in a comparison
        assert isinstance(read, Fence)
        assert [(s.code, s.detail) for s in read.severed] == [(s.code, s.detail) for s in message.severed]


def test_what_is_held_of_the_most_parts_survives_the_wire():
    for held in (0, 1, 1 << (MAX_PARTS - 1), (1 << MAX_PARTS) - 1):
        message = Report(committed=True, held=held)
        header, payload = encode_control(Term(1, 0), message)
        assert decode_control(header, memoryview(payload)) == (Term(1, 0), message)


def test_a_long_run_of_parts_is_short_on_the_wire():
    parts = (*range(1000), *range(5000, 400_000))
    job = Job(number=0, server=1, holder=None, contributors=0b101, consumers=0b100, parts=parts)
    header, payload = encode_control(Term(1, 0), Assign(jobs=(job,)))
    assert len(payload) < 40
    assert decode_control(header, memoryview(payload)) == (Term(1, 0), Assign(jobs=(job,)))


def test_a_long_story_is_cut_short_before_it_travels():
    told = "x" * 5000
    header, payload = encode_control(Term(1, 0), Leave(reason=told))
    _, message = decode_control(header, memoryview(payload))
    assert isinstance(message, Leave)
    assert len(message.reason) == MAX_DETAIL
    assert message.reason.endswith("x…")


def job_fields(server=0, holder=None, contributors=b"\3", consumers=b"\3", runs=(0, 1)):
    return [[server, holder, contributors, consumers, list(runs)]]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        pack(None),
        pack([]),
        pack({"kind": "done"}),
        pack(["done"]),
        pack(["done", 0]),
        pack(["done", -1, 0]),
        pack(["done", True, 0]),
        pack(["done", 0, 1 << 48]),
        pack(["done", 0.0, 0]),
        pack(["done", 0, 0, 0]),
        pack([["done"], 0, 0]),
        pack([None, 0, 0]),
        pack(["nonsense", 0, 0]),
        pack(["probe", 0, 0]),
        pack(["probe", 0, 0, "1"]),
        pack(["probe", 0, 0, -1]),
        pack(["alive", 0, 0, None]),
        pack(["ask", 0, 0, MAX_MEMBERS]),
        pack(["heard", 0, 0, 1.5]),
        pack(["leave", 0, 0, 7]),
        pack(["leave", 0, 0, "x" * (4 * MAX_DETAIL + 1)]),
        pack(["beat", 0, 0, -3]),
        pack(["report", 0, 0, 1]),
        pack(["report", 0, 0]),
        pack(["suspect", 0, 0, 1, None, "no-such-code", "", False]),
        pack(["suspect", 0, 0, 1, [1], "silent", "", False]),
        pack(["suspect", 0, 0, 1, [1, 2, 3], "silent", "", False]),
        pack(["suspect", 0, 0, 1, "12", "silent", "", False]),
        pack(["suspect", 0, 0, 1, 3, "silent", "", False]),
        pack(["suspect", 0, 0, MAX_MEMBERS, None, "silent", "", False]),
        pack(["suspect", 0, 0, 1, None, "silent", b"", False]),
        pack(["suspect", 0, 0, 1, None, "silent", "", None]),
        pack(["suspect", 0, 0, 1, None, ["silent"], "", False]),
    ],
    ids=repr,
)
def test_malformed_headers_are_refused(header):
    with pytest.raises(RemoteProtocolError, match="control message"):
        decode_control(header, memoryview(b""))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("fence", b""),
        ("fence", pack(3)),
        ("fence", pack([[]])),
        ("fence", pack([[], [], []])),
        ("fence", pack([[[0, "silent"]], []])),
        ("fence", pack([[["0", "silent", ""]], []])),
        ("fence", pack([[[0, "nonsense", ""]], []])),
        ("fence", pack([[], [[[0], 1, "silent", ""]]])),
        ("fence", pack([[], [[[0, 1], 1, "silent", "x" * 1000]]])),
        ("fence", pack([[], [[None, 1, "silent", ""]]])),
        ("fence", pack([{}, 1])),
        ("fence", pack([[], []]) + b"\0"),
        ("assign", b""),
        ("assign", pack(None)),
        ("assign", pack([[]])),
        ("assign", pack(job_fields(server=MAX_MEMBERS))),
        ("assign", pack(job_fields(holder=-1))),
        ("assign", pack(job_fields(contributors="abc"))),
        ("assign", pack(job_fields(consumers=b"x" * (MAX_MEMBERS // 8 + 1)))),
        ("assign", pack(job_fields(consumers=7))),
        ("assign", pack(job_fields(runs=(0,)))),
        ("assign", pack(job_fields(runs=(0, 1, 2)))),
        ("assign", pack(job_fields(runs=(0, MAX_PARTS)))),
        ("assign", pack(job_fields(runs=(MAX_PARTS - 1, 2)))),
        ("assign", pack(job_fields(runs=(-1, 2)))),
        ("assign", pack(job_fields(runs=("a", "b")))),
        ("assign", pack([[0, None, b"", b"", 5]])),
        ("assign", pack([[0, None, b"", b"", {"a": 1}]])),
        ("assign", pack([[0, None, b"", b"", "ab"]])),
    ],
    ids=repr,
)
def test_malformed_payloads_are_refused(kind, payload):
    with pytest.raises(RemoteProtocolError):
        decode_control(pack([kind, 1, 0]), memoryview(payload))


def test_a_bitmap_of_more_parts_than_a_plan_may_have_is_refused():
    with pytest.raises(RemoteProtocolError, match="too many parts"):
        decode_control(pack(["report", 1, 0, False]), memoryview(bytes(MAX_PARTS // 8 + 1)))


def test_a_short_message_cannot_announce_more_than_the_plan_has():
    def decoded(*jobs):
        fields = [[0, None, b"", b"", list(runs)] for runs in jobs]
        return decode_control(pack(["assign", 1, 0]), memoryview(pack(fields)), parts=1000)[1]

    everything = decoded(*[(0, 1000)] * MAX_JOBS_PER_PART)
    assert isinstance(everything, Assign)
    assert all(job.parts == tuple(range(1000)) for job in everything.jobs)
    with pytest.raises(RemoteProtocolError, match="65000 parts, where the plan has 1000"):
        decoded(*[(0, 1000)] * (MAX_JOBS_PER_PART + 1))
    with pytest.raises(RemoteProtocolError, match="part 1000 of a plan that has 1000"):
        decoded((999, 2))
    with pytest.raises(RemoteProtocolError):
        decoded((MAX_PARTS - 1, 1))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_random_bytes_raise_nothing_but_a_protocol_error(header, payload):
    with pytest.raises(RemoteProtocolError):
        decode_control(header, memoryview(payload))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
KINDS = st.sampled_from(
    ["suspect", "probe", "alive", "ask", "heard", "fence", "report", "assign", "done", "closed", "leave", "beat"]
)


@settings(max_examples=200, deadline=None)
@given(KINDS, st.lists(VALUES, max_size=6), VALUES)
def test_well_packed_nonsense_raises_nothing_but_a_protocol_error(kind, fields, content):
    try:
        payload = pack(content)
    except ValueError:  # a float that is no number, or the like
        payload = b""
    try:
        term, message = decode_control(pack([kind, 1, 0, *fields]), memoryview(payload))
    except RemoteProtocolError:
        return
    assert decode_control(*map_payload(encode_control(term, message))) == (term, message)


def map_payload(encoded):
    header, payload = encoded
    return header, memoryview(payload)


@settings(max_examples=300, deadline=None)
@given(MESSAGES, st.integers(0, 10_000), st.integers(0, 7), st.data())
def test_a_flipped_bit_gives_another_message_or_a_protocol_error(message, place, bit, data):
    header, payload = map(bytearray, encode_control(Term(3, 1), message))
    target = payload if payload and data.draw(st.booleans()) else header
    target[place % len(target)] ^= 1 << bit
    with suppress(RemoteProtocolError):
        decode_control(bytes(header), memoryview(bytes(payload)))
