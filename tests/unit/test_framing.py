"""Frames, without any I/O: encodings, the reader under every cutting of the stream, and rubbish."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import ChannelViolationError, RemoteProtocolError
from swarmavg.identifiers import PeerId
from swarmavg.transport.framing import (
    HEAD,
    MAX_CODE_CHARS,
    MAX_CONTROL_BYTES,
    MAX_REASON_CHARS,
    OPTIONAL,
    TLS_FIRST_BYTES,
    Frame,
    FrameReader,
    Hello,
    Kind,
    decode_cancel,
    decode_error,
    decode_open,
    encode,
    encode_cancel,
    encode_error,
    encode_open,
    negotiate,
)
from swarmavg.transport.interface import MAX_HEADER_BYTES, MAX_PURPOSE_CHARS
from swarmavg.transport.packing import pack

LIMIT = 300_000
PEER = PeerId(bytes(range(32)))


def header_of(frame: bytes, kind: Kind) -> bytes:
    number, flags, header_bytes, payload_bytes = HEAD.unpack_from(frame)
    assert (number, flags, header_bytes, payload_bytes) == (kind, 0, len(frame) - HEAD.size, 0)
    return frame[HEAD.size :]


class Cut(Exception):
    """The stream ended within a frame."""


def read(stream: bytes, cuts: list[int]) -> list[tuple[Kind, bytes, bytes]]:
    """Feed a reader with pieces of the given lengths, in turn, and collect what comes out."""
    reader, frames, position, turn = FrameReader(max_payload=LIMIT), [], 0, 0
    current: Frame | None = None
    while position < len(stream):
        buffer = reader.get_buffer()
        assert buffer.nbytes > 0
        count = min(buffer.nbytes, cuts[turn % len(cuts)], len(stream) - position)
        buffer[:count] = stream[position : position + count]
        reader.received(count)
        position, turn = position + count, turn + 1
        while True:
            current = current or reader.next_frame()
            if current is None:
                break
            if not reader.filling:
                reader.fill(memoryview(bytearray(current.payload_bytes)))
            if not reader.filled:
                break
            frames.append((current.kind, current.header, bytes(reader.take())))
            current = None
    if not reader.between_frames:
        raise Cut
    return frames


CUTS = st.lists(st.integers(1, 40_000) | st.integers(1, 30), min_size=1, max_size=20)
SIZES = st.integers(0, 40) | st.sampled_from([16_383, 16_384, 16_385, 100_000])
HEADERS = st.integers(0, 40) | st.sampled_from([16_000, 16_384, MAX_HEADER_BYTES])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(HEADERS, SIZES, st.booleans()), max_size=6), CUTS)
def test_however_the_stream_is_cut_the_frames_come_out(messages: list[tuple[int, int, bool]], cuts: list[int]) -> None:
    stream, expected = bytearray(), []
    for number, (header_bytes, payload_bytes, skipped_first) in enumerate(messages):
        header, payload = bytes([number]) * header_bytes, bytes([number + 100]) * payload_bytes
        if skipped_first:
            stream += encode(99, header, payload_bytes, flags=OPTIONAL) + payload
        stream += encode(Kind.MESSAGE, header, payload_bytes) + payload
        expected.append((Kind.MESSAGE, header, payload))
    assert read(bytes(stream), cuts) == expected


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), CUTS)
def test_rubbish_is_frames_or_a_violation(stream: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(ChannelViolationError, Cut):
        read(stream, cuts)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
@pytest.mark.parametrize("decode", [Hello.decode, decode_open, decode_error, decode_cancel])
def test_rubbish_in_control_headers_is_an_error_of_ours(decode: object, header: bytes) -> None:
    assert callable(decode)
    with contextlib.suppress(RemoteProtocolError):
        decode(header)


def test_a_payload_goes_straight_to_its_place() -> None:
    reader, target = FrameReader(max_payload=LIMIT), memoryview(bytearray(LIMIT))
    start = encode(Kind.MESSAGE, b"h", LIMIT)
    reader.get_buffer()[: len(start)] = start
    reader.received(len(start))
    assert reader.next_frame() == Frame(Kind.MESSAGE, b"h", LIMIT)
    reader.fill(target)
    assert reader.get_buffer().obj is target.obj
    assert reader.get_buffer().nbytes == LIMIT
    reader.received(1000)
    assert reader.get_buffer().nbytes == LIMIT - 1000
    assert not reader.filled
    reader.skip()
    assert reader.get_buffer().obj is not target.obj, "nothing is written there after a skip"


def test_a_skipped_payload_is_gone_and_the_next_frame_comes() -> None:
    reader = FrameReader(max_payload=LIMIT)
    stream = encode(Kind.MESSAGE, b"one", 5) + b"12345" + encode(Kind.END)
    reader.get_buffer()[: len(stream)] = stream
    reader.received(len(stream))
    assert reader.next_frame() == Frame(Kind.MESSAGE, b"one", 5)
    assert not reader.between_frames
    reader.skip()
    assert reader.next_frame() == Frame(Kind.END, b"", 0)
    assert reader.between_frames


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (HEAD.pack(77, 0, 0, 0), "unknown kind of frame 0x4d"),
        (HEAD.pack(Kind.MESSAGE, 0, 0, LIMIT + 1), f"at most {LIMIT}"),
        (HEAD.pack(77, OPTIONAL, 0, LIMIT + 1), f"at most {LIMIT}"),
        (HEAD.pack(Kind.OPEN, 0, 10, 1), "too large"),
        (HEAD.pack(Kind.CANCEL, 0, MAX_CONTROL_BYTES + 1, 0), "too large"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "it speaks TLS"),
    ],
)
def test_violations_are_seen_at_the_start_of_a_frame(frame: bytes, cause: str) -> None:
    reader = FrameReader(max_payload=LIMIT)
    reader.get_buffer()[: len(frame)] = frame
    reader.received(len(frame))
    with pytest.raises(ChannelViolationError, match=cause):
        reader.next_frame()


def test_no_frame_looks_like_tls() -> None:
    assert not set(Kind) & set(TLS_FIRST_BYTES)


def test_frames_have_limits_for_the_sender_too() -> None:
    encode(Kind.MESSAGE, bytes(MAX_HEADER_BYTES), 2**32 - 1)
    with pytest.raises(ValueError, match=f"at most {MAX_HEADER_BYTES} bytes, got {MAX_HEADER_BYTES + 1}"):
        encode(Kind.MESSAGE, bytes(MAX_HEADER_BYTES + 1))
    with pytest.raises(ValueError, match="4294967296"):
        encode(Kind.MESSAGE, b"", 2**32)


def test_control_frames_say_what_was_put_in() -> None:
    hello = Hello(PEER, b"s" * 32, 12345, (1, 7))
    assert Hello.decode(header_of(hello.encode(), Kind.HELLO)) == hello
    assert decode_open(header_of(encode_open("gossip"), Kind.OPEN)) == "gossip"
    assert decode_error(header_of(encode_error("code", "why"), Kind.ERROR)) == ("code", "why")
    assert decode_cancel(header_of(encode_cancel("why"), Kind.CANCEL)) == "why"


def test_the_longest_texts_fit_and_longer_ones_are_cut() -> None:
    wide = "\U0001f600"
    assert decode_open(header_of(encode_open(wide * MAX_PURPOSE_CHARS), Kind.OPEN)) == wide * MAX_PURPOSE_CHARS
    code, reason = decode_error(header_of(encode_error(wide * 5000, wide * 5000), Kind.ERROR))
    assert (code, reason) == (wide * MAX_CODE_CHARS, wide * MAX_REASON_CHARS)
    assert decode_cancel(header_of(encode_cancel(wide * 5000), Kind.CANCEL)) == wide * MAX_REASON_CHARS


@pytest.mark.parametrize("purpose", ["", "x" * (MAX_PURPOSE_CHARS + 1)])
def test_purposes_have_a_length(purpose: str) -> None:
    with pytest.raises(ValueError, match="purpose"):
        encode_open(purpose)
    with pytest.raises(RemoteProtocolError, match="purpose"):
        decode_open(pack({"purpose": purpose}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("versions", [1]),
        ("versions", [1, "2"]),
        ("versions", [True, 2]),
        ("versions", None),
        ("peer", b"short"),
        ("swarm", "s" * 32),
        ("limit", -1),
        ("limit", 1.5),
        ("limit", None),
    ],
)
def test_a_hello_is_checked_field_by_field(field: str, value: object) -> None:
    good = {"versions": [1, 1], "peer": PEER.digest, "swarm": bytes(32), "limit": 1, "added later": 1}
    Hello.decode(pack(good))
    with pytest.raises(RemoteProtocolError, match=field):
        Hello.decode(pack({**good, field: value}))


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 2), (3, 4), None), ((3, 4), (1, 2), None)],
)
def test_the_highest_common_version_is_spoken(ours: tuple[int, int], theirs: tuple[int, int], version: int | None) -> None:
    assert negotiate(ours, theirs) == version
