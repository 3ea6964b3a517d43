"""Headers of a round's channels: they survive the wire, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GroupId
from swarmavg.protocol.round_messages import (
    RoundBeat,
    RoundHello,
    RoundPart,
    RoundResult,
    RoundStart,
    decode_round_message,
)
from swarmavg.transport.packing import pack

MESSAGES = [
    RoundHello(group_id=GroupId(bytes(16)), term=0, sender=b"s" * 16, receiver=b"r" * 16, plan_hash=b"p" * 32),
    RoundStart(term=3, weight=0.25),
    RoundPart(term=0, index=7),
    RoundResult(term=1, index=2, contributors=0b1010_0000_0001),
    RoundResult(term=1, index=2, contributors=0),
    RoundBeat(term=0, waiting_for=(1, 300)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert decode_round_message(message.encode()) == message


@pytest.mark.parametrize(
    "fields",
    [
        [],
        "hello",
        ["nonsense", 0],
        ["part", -1, 0],
        ["part", 0, -1],
        ["part", 0, True],
        ["part", 0],
        ["part", 0, 1, 2],
        ["start", 0, -1.0],
        ["start", 0, float("nan")],
        ["start", 0, float("inf")],
        ["start", 0, "1"],
        ["result", 0, 1, 5],
        ["result", 0, 1, b"x" * 5000],
        ["beat", 0, [1.5]],
        ["beat", 0, 3],
        ["hello", 0, b"short", b"s" * 16, b"r" * 16, b"p" * 32],
        ["hello", 0, bytes(16), "s" * 16, b"r" * 16, b"p" * 32],
        [["part"], 0, 1],
    ],
    ids=str,
)
def test_malformed_headers_are_refused(fields):
    with pytest.raises(RemoteProtocolError):
        decode_round_message(pack(fields))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_decode_to_a_message(data):
    try:
        message = decode_round_message(data)
    except RemoteProtocolError:
        return
    assert decode_round_message(message.encode()) == message
