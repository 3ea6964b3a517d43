"""The limits of the one decoder that bytes of a peer go through."""

import contextlib
import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.errors import RemoteProtocolError
from swarmavg.transport.packing import MAX_DEPTH, MAX_ITEMS, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda child: st.lists(child, max_size=5) | st.dictionaries(st.text() | st.binary(), child, max_size=5),
    max_leaves=20,
)


def depth(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


def same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_what_is_packed_comes_out_again(value: object) -> None:
    if depth(value) <= MAX_DEPTH:
        assert same(unpack(pack(value), what="value"), value)
    else:
        with pytest.raises(RemoteProtocolError, match="nested deeper"):
            unpack(pack(value), what="value")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_or_an_error_of_ours(data: bytes) -> None:
    value: object = None
    with contextlib.suppress(RemoteProtocolError):
        value = unpack(data, what="value")
    assert depth(value) <= MAX_DEPTH


@settings(max_examples=150, deadline=None)
@given(VALUES, st.data())
def test_damaged_encodings_are_a_value_or_an_error_of_ours(value: object, data: st.DataObject) -> None:
    packed = bytearray(pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        unpack(packed, what="value")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pack(1) + b"\x00",  # something follows
        pack([1, 2])[:-1],  # cut
        b"\xc1",  # never used by msgpack
        b"\xd4\x01\x00",  # extension types, the timestamp too
        b"\xc7\x00\x05",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\x81\x01\x01",  # a map with a key that is neither string nor bytes
        b"\x81\x90\x01",
        b"\xa2\xff\xff",  # a string that is not UTF-8
        b"\xdd\xff\xff\xff\xff",  # lengths that the input cannot hold
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * (MAX_DEPTH + 1) + b"\x00",
        b"\x91" * 100_000 + b"\x00",
        b"\xdc\xff\xff" + b"\x00" * 0xFFFF,  # more items than allowed
    ],
)
def test_malformed_encodings(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"malformed thing: \S"):
        unpack(data, what="thing")


def test_the_size_is_limited() -> None:
    with pytest.raises(RemoteProtocolError, match="11 bytes, at most 10"):
        unpack(pack(b"x" * 9), what="thing", max_bytes=10)
    assert unpack(pack(b"x" * 8), what="thing", max_bytes=10) == b"x" * 8


def test_a_short_input_does_not_make_the_decoder_allocate_much() -> None:
    nested = b"\xdd" + MAX_ITEMS.to_bytes(4)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack(nested * 13_000, what="thing")
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_what_cannot_be_packed() -> None:
    with pytest.raises(TypeError):
        pack(object())
    with pytest.raises(ValueError, match="18446744073709551616"):
        pack(2**64)
