"""Headers of a round's channels: they survive the wire, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import GroupId
from swarmavg.protocol.round_control import Term
from swarmavg.protocol.round_messages import (
    ChannelKind,
    RoundBeat,
    RoundHello,
    RoundPart,
    RoundResult,
    RoundStart,
    decode_round_message,
)
from swarmavg.transport.packing import pack

MEMBERS: Any = {"group_id": GroupId(bytes(16)), "sender": b"s" * 16, "receiver": b"r" * 16, "plan_hash": b"p" * 32}
MESSAGES = [
    RoundHello(kind=ChannelKind.INPUTS, term=Term(0, 0), job=None, **MEMBERS),
    RoundHello(kind=ChannelKind.FETCH, term=Term(3, 1), job=2, **MEMBERS),
    RoundStart(weight=0.25),
    RoundPart(index=7),
    RoundResult(index=2, contributors=0b1010_0000_0001),
    RoundResult(index=2, contributors=0),
    RoundBeat(term=Term(2, 1), waiting_for=(1, 300)),
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
        ["part", -1],
        ["part", True],
        ["part"],
        ["part", 1, 2],
        ["start", -1.0],
        ["start", float("nan")],
        ["start", float("inf")],
        ["start", "1"],
        ["result", 1, 5],
        ["result", 1, b"x" * 5000],
        ["beat", [0, 0], [1.5]],
        ["beat", [0, 0], 3],
        ["beat", 0, []],
        ["beat", [0], []],
        ["hello", "inputs", [0, 0], None, b"short", b"s" * 16, b"r" * 16, b"p" * 32],
        ["hello", "inputs", [0, 0], None, bytes(16), "s" * 16, b"r" * 16, b"p" * 32],
        ["hello", "nonsense", [0, 0], None, bytes(16), b"s" * 16, b"r" * 16, b"p" * 32],
        ["hello", "inputs", [0, 0], -1, bytes(16), b"s" * 16, b"r" * 16, b"p" * 32],
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
