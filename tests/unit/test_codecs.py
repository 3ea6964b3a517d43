"""Round trips, error bounds and refusals of the codecs that work element by element."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmavg.compression import Compression, Float16Compression, Granularity, NoCompression, TensorInfo
from swarmavg.errors import RemoteProtocolError

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CODECS: list[Compression] = [NoCompression(), Float16Compression()]
LARGEST_FLOAT64 = 1.7976931348623157e308

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

anything = st.lists(st.floats(width=64), max_size=40)
"""Subnormals, infinities and NaN included; most are far out of float16's range."""
in_range = st.lists(
    st.one_of(st.floats(-65504, 65504), st.floats(-(2.0**-13), 2.0**-13), st.floats(-4, 4)), min_size=1, max_size=40
)


def round_trip(codec: Compression, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, 7)
    codec.decode(codec.encode(values), out)
    return out


def bits(values: torch.Tensor) -> bytes:
    return bytes(values.view(torch.uint8).numpy().data)


@every_codec
@every_dtype
@settings(max_examples=50, deadline=None)
@given(numbers=anything)
def test_size_is_exact_and_bytes_are_plain(codec: Compression, dtype: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    payload = codec.encode(values)
    assert (payload.format, payload.ndim, payload.itemsize) == ("B", 1, 1)
    assert payload.nbytes == codec.encoded_bytes(values.numel(), dtype)
    ratio = codec.estimate_compression_ratio(TensorInfo.of(values, "t"))
    assert ratio == (payload.nbytes / (values.numel() * dtype.itemsize) if numbers else 1.0)


@every_dtype
@settings(max_examples=50, deadline=None)
@given(numbers=anything)
def test_no_compression_keeps_every_bit(dtype: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    assert bits(round_trip(NoCompression(), values)) == bits(values)


@every_dtype
def test_no_compression_does_not_copy(dtype: torch.dtype) -> None:
    values = torch.zeros(3, dtype=dtype)
    payload = NoCompression().encode(values)
    values.fill_(1)
    assert bytes(payload) == bits(torch.ones(3, dtype=dtype))


def test_the_encoding_outlives_its_tensor() -> None:
    payload = NoCompression().encode(torch.arange(1000, dtype=torch.float32))
    out = torch.empty(1000)
    NoCompression().decode(payload, out)
    assert torch.equal(out, torch.arange(1000, dtype=torch.float32))


@every_dtype
@settings(max_examples=150, deadline=None)
@given(numbers=in_range)
@example(numbers=[65504.0, -65504.0, 2.0**-14, 2.0**-24, 2.0**-25, -(2.0**-26), 0.0, -0.0])
@example(numbers=[1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40, 2.0**-14 * (1 - 2.0**-11) - 2.0**-60])
def test_float16_error_bound(dtype: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    values = values[values.abs() <= 65504]
    error = (round_trip(Float16Compression(), values).double() - values.double()).abs()
    bound = torch.where(values.abs() >= 2.0**-14, values.double().abs() * 2.0**-11, 2.0**-25)
    if dtype is torch.float64:
        bound *= 1 + 2.0**-13
    if dtype is torch.bfloat16:
        bound[values.abs() > 65280] = 65504  # not in float16's range any more: clamped
    assert bool((error <= bound).all()), (values, error, bound)
    assert torch.equal(torch.signbit(round_trip(Float16Compression(), values)), torch.signbit(values))


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 65280.0), (torch.float32, 65504.0), (torch.float64, 65504.0)], ids=str
)
def test_float16_clamps_to_its_range(dtype: torch.dtype, limit: float) -> None:
    values = torch.tensor([65519.0, 65520.0, 1e30, math.inf, LARGEST_FLOAT64], dtype=torch.float64).to(dtype)
    limits = torch.full_like(values, limit)
    assert torch.equal(round_trip(Float16Compression(), values), limits)
    assert torch.equal(round_trip(Float16Compression(), -values), -limits)


@every_dtype
@pytest.mark.parametrize("length", [1, 8, 1000])
def test_float16_keeps_nan(dtype: torch.dtype, length: int) -> None:
    values = torch.full((length,), math.nan, dtype=dtype)
    values[-1] = -1.5
    decoded = round_trip(Float16Compression(), values)
    assert bool(decoded[:-1].isnan().all())
    assert decoded[-1] == -1.5
    total = torch.zeros(length)
    Float16Compression().decode_add(Float16Compression().encode(values), total, dtype, 2.0)
    assert bool(total[:-1].isnan().all())
    assert total[-1] == -3


@settings(max_examples=50, deadline=None)
@given(numbers=anything)
def test_float16_is_the_identity_on_float16(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float64).to(torch.float16)
    assert bytes(Float16Compression().encode(values)) == bits(values)
    assert bits(round_trip(Float16Compression(), values)) == bits(values)


@every_codec
@every_dtype
@settings(max_examples=100, deadline=None)
@given(numbers=anything)
def test_decoded_values_encode_to_the_same_bytes(codec: Compression, dtype: torch.dtype, numbers: list[float]) -> None:
    values = torch.tensor([number for number in numbers if not math.isnan(number)], dtype=torch.float64).to(dtype)
    decoded = round_trip(codec, values)
    assert bytes(codec.encode(decoded)) == bytes(codec.encode(values))
    assert bits(round_trip(codec, decoded)) == bits(decoded)


def test_bfloat16_numbers_of_float16_range_travel_exactly() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    size = every.float().abs()
    exact = every[(size == 0) | ((size >= 2.0**-17) & (size <= 65280))]
    assert bits(round_trip(Float16Compression(), exact)) == bits(exact)


@every_codec
@every_dtype
@pytest.mark.parametrize("weight", [1.0, 0.25, 3.0, 0.0])
@pytest.mark.parametrize("length", [0, 1, 1001])
def test_decode_add_is_decode_then_multiply_and_add(codec: Compression, dtype: torch.dtype, weight: float, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(length, generator=generator).to(dtype)
    start = torch.randn(length, generator=generator)
    accumulator = start.to(torch.float64 if dtype is torch.float64 else torch.float32)
    expected = accumulator + weight * round_trip(codec, values).to(accumulator.dtype)
    codec.decode_add(codec.encode(values), accumulator, dtype, weight)
    torch.testing.assert_close(accumulator, expected, rtol=1e-6, atol=1e-6)
    if weight == 1.0:
        assert torch.equal(accumulator, expected)


@every_codec
@every_dtype
@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("read_only", [False, True])
def test_payloads_lie_anywhere_in_memory(codec: Compression, dtype: torch.dtype, offset: int, read_only: bool) -> None:
    values = torch.arange(-10, 11).to(dtype)
    buffer = bytearray(offset) + bytearray(codec.encode(values)) + bytearray(3)
    payload = memoryview(buffer)[offset:-3]
    payload = payload.toreadonly() if read_only else payload
    out, total = torch.empty_like(values), torch.ones(values.numel())
    codec.decode(payload, out)
    codec.decode_add(payload, total, dtype, 2.0)
    assert torch.equal(out, values)
    assert torch.equal(total, 1 + 2 * values.float())
    assert bytes(payload) == bytes(codec.encode(values))


@every_codec
@every_dtype
@pytest.mark.parametrize("difference", [-1, 1, 2, 8])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_payloads_of_the_wrong_size_are_refused(codec: Compression, dtype: torch.dtype, difference: int, length: int) -> None:
    size = codec.encoded_bytes(length, dtype) + difference
    if size < 0:
        return
    total = torch.ones(length)
    with pytest.raises(RemoteProtocolError, match=rf"{codec.name}: payload of {size} bytes, expected {size - difference}"):
        codec.decode_add(memoryview(bytearray(size)), total, dtype, 1.0)
    with pytest.raises(RemoteProtocolError, match=codec.name):
        codec.decode(memoryview(bytearray(size)), torch.ones(length, dtype=dtype))
    assert torch.equal(total, torch.ones(length))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("others", [[], [math.nan], [math.nan, -math.nan, 1.0]])
@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_float16_refuses_infinities_it_cannot_have_made(dtype: torch.dtype, others: list[float], infinity: float) -> None:
    payload = NoCompression().encode(torch.tensor([0.0, *others, infinity, 2.0], dtype=torch.float16))
    total = torch.ones(len(others) + 3)
    with pytest.raises(RemoteProtocolError, match=f"infinity in the payload of a {dtype} tensor"):
        Float16Compression().decode_add(payload, total, dtype, 1.0)
    with pytest.raises(RemoteProtocolError, match="infinity"):
        Float16Compression().decode(payload, torch.empty(total.numel(), dtype=dtype))
    assert torch.equal(total, torch.ones_like(total))


@every_codec
def test_only_flat_contiguous_float_tensors_are_encoded(codec: Compression) -> None:
    for bad in (torch.zeros(2, 2), torch.zeros(()), torch.zeros(4, dtype=torch.float16)[::2], torch.zeros(4, device="meta")):
        with pytest.raises(ValueError, match="flat contiguous CPU tensor"):
            codec.encode(bad)
    with pytest.raises(ValueError, match=r"dtype=torch\.int64"):
        codec.encode(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"dtype=torch\.bool"):
        codec.encoded_bytes(3, torch.bool)


@every_codec
def test_parameters_that_require_gradients_are_encoded(codec: Compression) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    out = torch.empty(2)
    codec.decode(codec.encode(parameter), out)
    assert out.tolist() == [1.0, -2.0]


def test_codecs_say_what_they_are() -> None:
    assert [codec.name for codec in CODECS] == ["none/1", "float16/1"]
    assert [codec.lossless for codec in CODECS] == [True, False]
    assert {codec.granularity for codec in CODECS} == {Granularity.ELEMENTWISE}
    assert CODECS[0] == NoCompression()
    assert CODECS[0] != CODECS[1]
    assert {pickle.loads(pickle.dumps(codec)) for codec in CODECS} == set(CODECS)
    assert [repr(codec) for codec in CODECS] == ["NoCompression()", "Float16Compression()"]
