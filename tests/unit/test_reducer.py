"""Weighted accumulation of a range, and the snapshot in which results land."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from swarmavg.compression import Compression, Float16Compression, NoCompression, TensorInfo
from swarmavg.compression.finite import all_finite
from swarmavg.errors import RemoteProtocolError
from swarmavg.planning.partition import Layout, make_plan
from swarmavg.reduction.reducer import RangeReducer
from swarmavg.reduction.snapshot import Snapshot

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


class ByDecoding(Float16Compression):
    """A codec that finds out by decoding, as any codec may."""

    is_finite = Compression.is_finite


class Members:
    """Contributors at positions 0..n-1 and one reducer at position n, which contributes nothing."""

    def __init__(self, tensors_of_each, codec=None, part_size_bytes=256, **options):
        codec = codec or NoCompression()
        infos = [TensorInfo.of(tensor, index) for index, tensor in enumerate(tensors_of_each[0])]
        self.layout = Layout.of(infos, [codec] * len(infos))
        count = len(tensors_of_each)
        self.plan = make_plan(
            self.layout,
            contributes=[True] * count + [False],
            reduces=[False] * count + [True],
            bandwidths=[None] * (count + 1),
            part_size_bytes=part_size_bytes,
        )
        self.snapshots = [Snapshot(self.layout) for _ in tensors_of_each]
        for snapshot, tensors in zip(self.snapshots, tensors_of_each, strict=True):
            snapshot.take(tensors)
        parts = self.plan.parts[count]
        memory = torch.full((RangeReducer.accumulator_bytes(self.layout, parts),), 255, dtype=torch.uint8)
        self.reducer = RangeReducer(self.layout, parts, self.plan.contributors, memory, **options)

    def deliver(self, position, index):
        part = self.reducer.parts[index]
        codec = self.layout.runs[part.run].codec
        self.reducer.add(position, index, codec.encode(self.snapshots[position].values(part)))

    def deliver_all(self, position, weight):
        self.reducer.begin(position, weight)
        for index in range(len(self.reducer.parts)) if weight else ():
            self.deliver(position, index)

    def commit(self, tensors, alpha=1.0):
        snapshot = Snapshot(self.layout)
        snapshot.take(tensors)
        averaged = []
        for result in self.reducer.results:
            if result.contributors:
                self.layout.runs[result.part.run].codec.decode(result.payload, snapshot.values(result.part))
                averaged.append(result.part)
        snapshot.commit(tensors, averaged, alpha)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**31),
    st.data(),
)
def test_the_result_is_the_weighted_mean_in_any_arrival_order(count, shapes, seed, data):
    generator = torch.Generator().manual_seed(seed)
    each = [[torch.randn(size, generator=generator).to(dtype) for size, dtype in shapes] for _ in range(count)]
    weights = [data.draw(st.sampled_from([0.0, 0.25, 1.0, 3.5, 100.0])) for _ in range(count)]
    members = Members(each)
    for position in data.draw(st.permutations(range(count))):
        members.deliver_all(position, weights[position])
    assert members.reducer.finished
    output = [torch.full((size,), 7.0, dtype=dtype) for size, dtype in shapes]
    members.commit(output)
    for index, (_, dtype) in enumerate(shapes):
        if sum(weights) == 0:
            assert (output[index] == 7.0).all()
            continue
        expected = sum(w * each[p][index].double() for p, w in enumerate(weights)) / sum(weights)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(output[index].double(), expected, rtol=tolerance, atol=tolerance)


def test_a_part_waits_for_every_live_contributor_and_no_longer_for_an_excluded_one():
    each = [[torch.full((100,), float(value))] for value in (1, 2, 6)]
    members = Members(each)
    reducer = members.reducer
    assert len(reducer.parts) == 2
    for position in range(3):
        reducer.begin(position, 1.0)
    members.deliver(0, 0)
    members.deliver(1, 0)
    assert reducer.results == []
    assert reducer.waiting_for() == [2]
    members.deliver(2, 0)
    assert [result.contributors for result in reducer.results] == [0b111]
    members.deliver(0, 1)
    members.deliver(1, 1)
    reducer.exclude(2)
    assert [result.contributors for result in reducer.results] == [0b111, 0b011]
    output = [torch.zeros(100)]
    members.commit(output)
    assert output[0][:64].eq(3.0).all()
    assert output[0][64:].eq(1.5).all()


def test_a_weight_of_zero_holds_nobody_up_and_all_zero_keeps_everything():
    members = Members([[torch.ones(10)], [torch.zeros(10)]])
    members.reducer.begin(0, 0.0)
    assert not members.reducer.finished
    members.reducer.begin(1, 0.0)
    assert members.reducer.finished
    assert members.reducer.results[0].contributors == 0
    assert members.reducer.results[0].payload.nbytes == 0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, 1e300, 1e-30])
def test_weights_that_would_spoil_the_average_are_refused(weight):
    members = Members([[torch.ones(10)]])
    with pytest.raises(RemoteProtocolError, match="weight"):
        members.reducer.begin(0, weight)


def test_parts_out_of_order_before_the_weight_or_of_the_wrong_size_are_refused_and_add_nothing():
    members = Members([[torch.ones(200)], [torch.ones(200)]])
    with pytest.raises(RemoteProtocolError, match="may not send"):
        members.deliver(0, 0)
    members.reducer.begin(0, 1.0)
    with pytest.raises(RemoteProtocolError, match="given twice"):
        members.reducer.begin(0, 2.0)
    with pytest.raises(RemoteProtocolError, match="part 1 where part 0"):
        members.deliver(0, 1)
    with pytest.raises(RemoteProtocolError, match="bytes"):
        members.reducer.add(0, 0, memoryview(bytearray(3)))
    members.deliver(0, 0)
    with pytest.raises(RemoteProtocolError, match="part 0 where part 1"):
        members.deliver(0, 0)
    members.reducer.exclude(1)
    for index in range(1, len(members.reducer.parts)):
        members.deliver(0, index)
    assert members.reducer.finished
    with pytest.raises(RemoteProtocolError, match="is due"):
        members.reducer.add(0, 99, memoryview(bytearray(256)))


def test_every_receiver_of_a_lossy_result_decodes_the_same_bits():
    members = Members([[torch.randn(300)], [torch.randn(300)]], codec=Float16Compression())
    members.deliver_all(0, 1.0)
    members.deliver_all(1, 2.0)
    first, second = [torch.zeros(300)], [torch.ones(300)]
    members.commit(first)
    members.commit(second)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.5])
def test_commit_moves_the_local_value_by_alpha(dtype, alpha):
    members = Members([[torch.full((100,), 8.0, dtype=dtype)]])
    members.deliver_all(0, 1.0)
    local = [torch.full((100,), 2.0, dtype=dtype)]
    members.commit(local, alpha)
    torch.testing.assert_close(local[0], torch.full((100,), 2.0 + alpha * 6.0, dtype=dtype))


def test_commit_writes_through_strides_and_leaves_the_rest_alone():
    base = torch.zeros(20, 10)
    view = base.t()[::2]  # 5 x 20, not contiguous
    members = Members([[torch.arange(100.0).view(5, 20)]])
    members.reducer.begin(0, 1.0)
    members.deliver(0, 0)  # 64 of 100 elements
    members.commit([view])
    assert torch.equal(view.reshape(-1)[:64], torch.arange(64.0))
    assert view.reshape(-1)[64:].eq(0).all()
    assert base[:, 1::2].eq(0).all()


def test_a_tensor_that_changed_shape_is_refused_before_anything_is_written():
    members = Members([[torch.ones(4), torch.ones(4)]])
    members.deliver_all(0, 1.0)
    tensors = [torch.zeros(4), torch.zeros(4)]
    snapshot = Snapshot(members.layout)
    snapshot.take(tensors)
    tensors[1].resize_(5)
    with pytest.raises(ValueError, match=r"tensors\[1\] is now \(5,\)"):
        snapshot.commit(tensors, members.reducer.parts, 1.0)
    assert tensors[0].eq(0).all()


# ---- values that are not finite

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression(), ByDecoding()], ids=["none", "float16", "decoding"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("honest_first", [False, True], ids=["first-to-arrive", "second-to-arrive"])
def test_a_part_that_is_not_finite_is_refused_and_nothing_of_it_is_in_any_sum(dtype, codec, bad, honest_first):
    if codec != NoCompression() and dtype is not torch.float16 and math.isinf(bad):
        bad = math.nan  # the codec makes an infinity a finite number
    each = [[torch.full((300,), float(value), dtype=dtype)] for value in (1, 5, 5)]
    each[1][0][200] = bad
    members = Members(each, codec)
    reducer = members.reducer
    (refused,) = [index for index, part in enumerate(reducer.parts) if part.start <= 200 < part.stop]
    assert refused > 0
    for position, weight in enumerate([1.0, 2.0, 1.0]):
        reducer.begin(position, weight)
    for index in range(refused):
        for position in range(3):
            members.deliver(position, index)
    if honest_first:
        members.deliver(0, refused)
    with pytest.raises(RemoteProtocolError, match=f"part {refused} holds NaN or infinite"):
        members.deliver(1, refused)
    assert reducer.waiting_for() == ([1, 2] if honest_first else [0, 1, 2])
    reducer.exclude(1)
    for position in (0, 2):
        for index in range(refused + (honest_first and position == 0), len(reducer.parts)):
            members.deliver(position, index)
    assert [result.contributors for result in reducer.results] == [
        0b111 if i < refused else 0b101 for i in range(len(reducer.parts))
    ]
    output = [torch.zeros(300, dtype=dtype)]
    members.commit(output)
    border = reducer.parts[refused].start
    assert output[0][:border].eq(4.0).all()
    assert output[0][border:].eq(3.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_allowed_values_that_are_not_finite_are_averaged_by_the_rules_of_arithmetic(dtype):
    each = [[torch.ones(5, dtype=dtype)], [torch.tensor([*BAD, 3.0, 5.0], dtype=dtype)]]
    members = Members(each, reject_nonfinite=False)
    members.deliver_all(0, 1.0)
    members.deliver_all(1, 1.0)
    output = [torch.zeros(5, dtype=dtype)]
    members.commit(output)
    assert output[0][0].isnan()
    assert output[0][1:].tolist() == [math.inf, -math.inf, 2.0, 3.0]


def test_finite_values_whose_sum_overflows_are_admitted_and_average_to_infinity():
    members = Members([[torch.tensor([3e38, 1.0])], [torch.tensor([3e38, 3.0])]])
    members.deliver_all(0, 1.0)
    members.deliver_all(1, 1.0)
    output = [torch.zeros(2)]
    members.commit(output)
    assert output[0].tolist() == [math.inf, 2.0]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 300), st.integers(0, 2**31), st.floats(0, 1), st.data())
def test_all_finite_agrees_with_torch_also_where_the_sum_overflows(dtype, size, seed, huge, data):
    generator = torch.Generator().manual_seed(seed)
    limit = torch.finfo(dtype).max
    values = torch.randn(size, generator=generator).to(dtype)
    values[torch.rand(size, generator=generator) < huge] = limit
    values[torch.rand(size, generator=generator) < huge / 2] = -limit
    for _ in range(data.draw(st.integers(0, 2)) if size else 0):
        values[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from(BAD))
    assert all_finite(values) is bool(values.isfinite().all())


def test_a_snapshot_that_rejects_names_the_tensor_the_count_and_the_first_place():
    tensors = [torch.ones(3), torch.ones(4, 5, dtype=torch.bfloat16), torch.ones(2, 2)]
    infos = [TensorInfo.of(tensor, f"layer{index}.weight") for index, tensor in enumerate(tensors)]
    snapshot = Snapshot(Layout.of(infos, [NoCompression()] * 3))
    snapshot.take(tensors, True)
    tensors[1].t()[2, 1] = -math.inf
    tensors[1][3, 4] = math.nan
    tensors[2][1, 1] = math.inf
    with pytest.raises(ValueError, match=r"tensors\[2\] \(key 'layer2.weight'\) holds 1 of 4 .* the first is inf at element 3"):
        snapshot.take(tensors, True)
    tensors[2].fill_(1.0)
    with pytest.raises(
        ValueError, match=r"tensors\[1\] \(key 'layer1.weight'\) holds 2 of 20 .* the first is -inf at element 7"
    ):
        snapshot.take(tensors, True)
    snapshot.take(tensors)


# ---- what a commit leaves behind

VIEWS = {
    "flat": lambda: torch.randn(200_000),
    "rows": lambda: torch.randn(70_000, 3),
    "one long row": lambda: torch.randn(1, 1, 200_000),
    "transposed": lambda: torch.randn(100_000, 2).t(),
    "every other column": lambda: torch.randn(300, 1000)[:, ::2],
    "two-byte": lambda: torch.randn(3, 70_000).to(torch.bfloat16),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 5),
}


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "all-but-the-last-part"])
def test_results_are_still_in_the_snapshot_after_a_commit_that_blends(kind, alpha, whole):
    torch.manual_seed(1)
    local = VIEWS[kind]()
    before = local.clone()
    members = Members([[torch.randn(local.shape).to(local.dtype)]], part_size_bytes=65_536)
    parts = members.reducer.parts if whole else members.reducer.parts[:-1]
    snapshot = members.snapshots[0]
    results = [snapshot.values(part).clone() for part in parts]
    snapshot.commit([local], parts, alpha)
    assert all(torch.equal(snapshot.values(part), result) for part, result in zip(parts, results, strict=True))
    average = torch.cat([*results, before.reshape(-1)[sum(map(len, results)) :]]).view(local.shape)
    wide = torch.float64 if local.dtype is torch.float64 else torch.float32
    expected = before.to(wide).add(average.to(wide) - before.to(wide), alpha=alpha).to(local.dtype)
    assert torch.equal(local, average if alpha == 1.0 else expected)


def test_blending_takes_no_second_copy_of_the_tensors():
    class Watching(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    for dtype in DTYPES:
        local = torch.randn(2, 300_000).to(dtype)
        members = Members([[torch.randn(2, 300_000).to(dtype)]], part_size_bytes=1 << 20)
        known = {tensor.untyped_storage().data_ptr() for tensor in [local, *members.snapshots[0]._flat]}
        with Watching() as watching:
            members.snapshots[0].commit([local], members.reducer.parts, 0.5)
        assert 0 < watching.largest <= 1 << 19
