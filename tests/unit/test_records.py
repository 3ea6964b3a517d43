"""Signed records: what is encoded is read back, what is altered is noticed, what is malformed is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.discovery.address_book import Announcement
from swarmavg.discovery.gossip_messages import Digest, GossipMessage, Passed, Records, Summary, decode_message
from swarmavg.discovery.interface import MAX_TOPIC_BYTES, MAX_VALUE_BYTES, Version
from swarmavg.discovery.limits import MAX_TTL_SECONDS
from swarmavg.discovery.records import SignedRecord, decode_record, sign_record
from swarmavg.errors import RemoteProtocolError
from swarmavg.identifiers import Address
from swarmavg.security.identity import Identity
from swarmavg.transport.packing import pack, unpack

ALICE, BOB = Identity.generate(), Identity.generate()
SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32


def make(**changes: Any) -> SignedRecord:
    fields: dict[str, Any] = {"topic": "run.presence", "version": Version(7, 1), "ttl": 30.0, "value": b"hello"}
    return sign_record(ALICE, SWARM, **{**fields, **changes})


def altered(record: SignedRecord, index: int, value: object) -> SignedRecord:
    fields = unpack(record.body, what="record")
    fields[index] = value
    return decode_record(pack(fields), record.signature)


def test_decoding_gives_back_what_was_signed() -> None:
    record = make(urgent=True)
    again = decode_record(record.body, record.signature)
    assert again == record
    assert again.owner == ALICE.peer_id
    assert again.is_authentic(SWARM)


def test_a_tombstone_is_signed_like_any_record() -> None:
    record = make(value=b"", withdrawn=True)
    again = decode_record(record.body, record.signature)
    assert again.withdrawn
    assert again.is_authentic(SWARM)


def test_a_record_of_another_swarm_is_not_authentic() -> None:
    assert not make().is_authentic(OTHER_SWARM)


@pytest.mark.parametrize(
    ("index", "value"),
    [(0, "other"), (1, BOB.public_key), (2, 8), (3, 2), (4, 31.0), (5, b"hullo"), (6, True)],
)
def test_an_altered_field_is_not_authentic(index: int, value: Any) -> None:
    assert not altered(make(), index, value).is_authentic(SWARM)


def test_a_plain_signature_of_the_same_bytes_is_no_record() -> None:
    record = make()
    assert not decode_record(record.body, ALICE.sign(record.body)).is_authentic(SWARM)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, ""),
        (0, "x" * (MAX_TOPIC_BYTES + 1)),
        (0, 5),
        (1, b"short"),
        (1, "text"),
        (2, -1),
        (2, 2**62 + 1),
        (2, True),
        (3, 1.5),
        (4, 0.0),
        (4, -1.0),
        (4, float("nan")),
        (4, float("inf")),
        (4, MAX_TTL_SECONDS + 1),
        (5, b"x" * (MAX_VALUE_BYTES + 1)),
        (5, "text"),
        (6, 1),
        (7, None),
        (7, True),  # a tombstone with a value
    ],
)
def test_malformed_fields_are_refused(index: int, value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed record"):
        altered(make(), index, value)


@pytest.mark.parametrize("body", [b"", b"\xc1", pack([]), pack({"topic": "t"}), pack([1] * 9), make().body + b"\0"])
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed record"):
        decode_record(body, b"s" * 64)


def test_a_signature_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_record(make().body, b"short")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"topic": ""}, "topic"),
        ({"topic": "ä" * 129}, "topic"),
        ({"topic": "\ud800"}, "topic"),
        ({"value": b"x" * (MAX_VALUE_BYTES + 1)}, "value"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": MAX_TTL_SECONDS * 2}, "ttl"),
        ({"version": Version(-1, 0)}, "version"),
        ({"version": Version(0, 2**62 + 1)}, "version"),
        ({"withdrawn": True}, "value"),
    ],
)
def test_what_no_record_may_hold_is_refused_with_its_name(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make(**changes)


@pytest.mark.parametrize(
    "changes", [{"topic": b"bytes"}, {"value": "text"}, {"value": bytearray(2)}, {"ttl": "1"}, {"ttl": True}]
)
def test_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        make(**changes)


def test_a_swarm_id_has_a_fixed_length() -> None:
    with pytest.raises(ValueError, match="swarm_id"):
        sign_record(ALICE, b"short", topic="t", version=Version(1, 1), ttl=1.0)


MESSAGES: list[GossipMessage] = [
    Digest(b"d" * 128),
    Summary(16, frozenset({0, 15}), {b"f" * 16: Version(3, 2**62)}),
    Summary(256, frozenset(range(256)), {}),
    Records(((make(), 1.5), (make(value=b"", withdrawn=True), 0.0))),
    Records(()),
    Passed("topic", Version(1, 2)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_read_back(message: GossipMessage) -> None:
    assert decode_message(message.encode()) == message


@pytest.mark.parametrize(
    "fields",
    [
        [],
        {},
        [5],
        ["unknown"],
        ["digest", "text"],
        ["summary", 17, b"", b""],
        ["summary", 16, b"\x10", b""],
        ["summary", 16, b"\x01", b"short"],
        ["summary", 16, b"", b"\xff" * 32],
        ["summary", 16, b"", b"\x00" * 32 * 1501],
        ["records", 1],
        ["records", [[b"body", b"s" * 64, 1.0]]],
        ["records", [[make().body, make().signature, -1.0]]],
        ["records", [[make().body, make().signature, float("nan")]]],
        ["records", [[make().body, make().signature]]],
        ["records", [[make().body, make().signature, 1.0]] * 65],
        ["passed", "", 1, 1],
        ["passed", "t", -1, 1],
        ["passed", "t", 1, "1"],
    ],
)
def test_malformed_messages_are_refused(fields: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_message(pack(fields))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_but_never_break(data: bytes) -> None:
    readers: list[Callable[[bytes], object]] = [decode_message, lambda body: decode_record(body, b"s" * 64)]
    for read in readers:
        try:
            read(data)
        except RemoteProtocolError:
            continue


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_are_refused_or_read_but_never_break(message: GossipMessage, data: st.DataObject) -> None:
    damaged = bytearray(message.encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255))
    try:
        decode_message(bytes(damaged))
    except RemoteProtocolError:
        return


def test_announcements_carry_addresses_without_repeating_the_owner() -> None:
    announcement = Announcement((Address.parse("tcp://127.0.0.1:5"), Address.parse("tcp://[::1]:6")))
    again = Announcement.decode(announcement.encode(), ALICE.peer_id)
    assert [str(address) for address in again.addresses] == [
        f"tcp://{ALICE.peer_id}@127.0.0.1:5",
        f"tcp://{ALICE.peer_id}@[::1]:6",
    ]
    assert Announcement.decode(Announcement(()).encode(), ALICE.peer_id).addresses == ()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        pack([]),
        pack({"addresses": "tcp://a:1"}),
        pack({"addresses": [1]}),
        pack({"addresses": ["nonsense"]}),
        pack({"addresses": ["tcp://a:0"]}),
        pack({"addresses": [f"tcp://{BOB.peer_id}@a:1"]}),
        pack({"addresses": ["tcp://a:1"] * 17}),
        pack({"addresses": ["tcp://" + "a" * 500 + ":1"]}),
    ],
)
def test_malformed_announcements_are_refused(value: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed announcement"):
        Announcement.decode(value, ALICE.peer_id)
