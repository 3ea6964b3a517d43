"""Layout, parts and plans: every element in exactly one part, and spans in the user's numbering."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.compression import Float16Compression, NoCompression, TensorInfo
from swarmavg.planning.partition import Layout, Plan, Span, make_plan

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def layout_of(tensors, codecs=None):
    infos = [TensorInfo.of(tensor, index) for index, tensor in enumerate(tensors)]
    return Layout.of(infos, codecs or [NoCompression()] * len(infos))


def plan_of(layout, members=3, part_size_bytes=256, **options) -> Plan:
    defaults = {"contributes": [True] * members, "reduces": [True] * members, "bandwidths": [None] * members}
    return make_plan(layout, part_size_bytes=part_size_bytes, **{**defaults, **options})


shapes = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(DTYPES), st.booleans()), max_size=12)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.integers(64, 1024))
def test_parts_cover_every_element_once_and_spans_map_back(tensors, members, part_size):
    infos = [TensorInfo.of(torch.empty(size, dtype=dtype), index) for index, (size, dtype, _) in enumerate(tensors)]
    layout = Layout.of(infos, [Float16Compression() if half else NoCompression() for _, _, half in tensors])
    plan = plan_of(layout, members, part_size)
    seen = torch.zeros(layout.total, dtype=torch.int64)
    for share, parts in zip(plan.shares, plan.parts, strict=True):
        assert sum(map(len, parts)) == share
        assert [part.index for part in parts] == list(range(len(parts)))
        for part in parts:
            run = layout.runs[part.run]
            assert run.start <= part.start < part.stop <= run.stop
            assert run.codec.encoded_bytes(len(part), run.dtype) <= part_size
            seen[part.start : part.stop] += 1
    assert (seen == 1).all()
    every = [part for parts in plan.parts for part in parts]
    assert layout.spans(every) == ([Span(0, layout.total)] if layout.total else [])
    lengths = sum(len(span) for span in layout.spans(every[::2]))
    assert lengths == sum(len(part) for part in every[::2])


def test_spans_follow_the_order_given_even_where_the_layout_regroups():
    layout = layout_of([torch.empty(4), torch.empty(4, dtype=torch.float16), torch.empty(4)])
    assert [run.tensors for run in layout.runs] == [(0, 2), (1,)]
    plan = plan_of(layout, members=1)
    (floats, halves) = plan.parts[0]
    assert layout.spans([floats]) == [Span(0, 4), Span(8, 12)]
    assert layout.spans([halves]) == [Span(4, 8)]


def test_thousands_of_small_tensors_share_parts():
    layout = layout_of([torch.empty(10) for _ in range(5000)])
    plan = plan_of(layout, members=4, part_size_bytes=256 * 1024)
    assert sum(map(len, plan.parts)) == 4


def test_the_plan_hash_covers_everything_that_shapes_a_plan():
    base = layout_of([torch.empty(100)])
    hashes = {
        plan_of(base).hash,
        plan_of(base, 4).hash,
        plan_of(base, part_size_bytes=512).hash,
        plan_of(base, bandwidths=[1.0, 2.0, 3.0]).hash,
        plan_of(base, contributes=[True, True, False]).hash,
        plan_of(layout_of([torch.empty(100, dtype=torch.float16)])).hash,
        plan_of(layout_of([torch.empty(100)], [Float16Compression()])).hash,
        plan_of(layout_of([torch.empty(101)])).hash,
    }
    assert len(hashes) == 8
    assert plan_of(layout_of([torch.empty(100)])).hash == plan_of(base).hash


def test_an_empty_vector_and_a_group_without_contributors_have_nothing_to_reduce():
    assert plan_of(layout_of([torch.empty(0)])).reducers == ()
    assert plan_of(layout_of([torch.empty(5)]), contributes=[False] * 3).reducers == ()
