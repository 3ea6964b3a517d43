"""Copies between the training state and the averaging buffers: dtypes, parts of tensors, the delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmavg.compression.interface import TensorRole
from swarmavg.planning.partition import Span
from swarmavg.training.averaged_tensors import AveragedTensor, AveragingBuffers, add_change
from swarmavg.training.device_copy import CallerStreams

FINITE = st.floats(-1e4, 1e4, width=32)


def buffers_of(*tensors: torch.Tensor, statistic: bool = False, reuse: bool = False, delta: bool = False) -> AveragingBuffers:
    averaged = [
        AveragedTensor(f"t{index}", TensorRole.PARAMETER, lambda tensor=tensor: tensor, is_statistic=statistic)  # type: ignore[misc]
        for index, tensor in enumerate(tensors)
    ]
    return AveragingBuffers(averaged, reuse=reuse, delta=delta)


def everything(*tensors: torch.Tensor) -> list[Span]:
    return [Span(0, sum(tensor.numel() for tensor in tensors))]


@pytest.mark.parametrize(
    ("dtype", "buffer_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_buffers_are_float32_or_float64_copies(dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    parameter = torch.tensor([1.5, -2.25], dtype=dtype, requires_grad=True)
    buffers = buffers_of(parameter)
    assert buffers.tensors[0].dtype is buffer_dtype
    assert buffers.tensors[0].tolist() == [1.5, -2.25]
    assert not buffers.tensors[0].requires_grad
    buffers.tensors[0].add_(1)
    buffers.apply(everything(parameter))
    assert parameter.dtype is dtype
    assert parameter.tolist() == [2.5, -1.25]
    assert parameter.is_leaf


def test_empty_zero_dimensional_and_strided_tensors() -> None:
    strided = torch.arange(6.0).view(2, 3).t()
    tensors = [torch.empty(0), torch.tensor(3.0), strided]
    buffers = buffers_of(*tensors)
    for buffer in buffers.tensors:
        buffer.mul_(2)
    buffers.apply(everything(*tensors))
    assert tensors[1].item() == 6.0
    assert strided.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


def test_only_averaged_elements_are_written() -> None:
    first, second = torch.zeros(4), torch.arange(6.0).view(2, 3).t()
    buffers = buffers_of(first, second)
    for buffer in buffers.tensors:
        buffer.fill_(9.0)
    second.add_(100.0)  # an update made meanwhile
    buffers.apply([Span(6, 8), Span(1, 3)])
    assert first.tolist() == [0.0, 9.0, 9.0, 0.0]
    assert second.flatten().tolist() == [100.0, 103.0, 9.0, 9.0, 102.0, 105.0]


def test_adjacent_spans_make_a_whole() -> None:
    tensor = torch.zeros(4)
    buffers = buffers_of(tensor)
    buffers.tensors[0].fill_(1.0)
    buffers.apply([Span(2, 4), Span(0, 2)])
    assert tensor.tolist() == [1.0] * 4


def test_nothing_averaged_nothing_written() -> None:
    tensor = torch.zeros(4)
    buffers = buffers_of(tensor)
    buffers.tensors[0].fill_(1.0)
    buffers.apply([])
    assert tensor.tolist() == [0.0] * 4


def test_reused_tensors_are_the_buffers() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    buffers = buffers_of(tensor, reuse=True)
    assert buffers.tensors[0] is tensor
    with torch.no_grad():
        tensor.fill_(2.0)
    buffers.load()
    buffers.apply(everything(tensor))
    assert tensor.tolist() == [2.0] * 3


def test_a_tensor_that_changed_its_form_is_named_before_anything_is_written() -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    buffers = buffers_of(first, second)
    buffers.tensors[0].fill_(5.0)
    second.data = second.data.double()
    with pytest.raises(ValueError, match=r"t1' has changed.*float32.*float64"):
        buffers.apply(everything(first, second))
    assert first.tolist() == [0.0, 0.0]


def test_the_delta_rule_keeps_local_updates() -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    buffers = buffers_of(tensor, delta=True)
    buffers.tensors[0].copy_(torch.tensor([5.0, 5.0, 5.0]))
    tensor.add_(torch.tensor([0.5, 0.0, -1.0]))
    buffers.apply(everything(tensor))
    assert tensor.tolist() == [5.5, 5.0, 4.0]


def test_the_delta_rule_in_bfloat16_is_computed_in_float32() -> None:
    tensor = torch.tensor([256.0, 256.0], dtype=torch.bfloat16)
    buffers = buffers_of(tensor, delta=True)
    buffers.tensors[0].add_(0.75)  # less than the distance of neighbours in bfloat16, which is 2 here
    tensor[0] = 258.0
    buffers.apply(everything(tensor))
    assert tensor.tolist() == [258.0, 256.0]
    buffers.load()
    buffers.tensors[0].add_(1.5)
    tensor[1] += 2
    buffers.apply(everything(tensor))
    assert tensor.tolist() == [260.0, 260.0]


def test_a_second_moment_stays_positive_under_the_delta_rule() -> None:
    statistic = torch.tensor([4.0, 4.0])
    buffers = buffers_of(statistic, statistic=True, delta=True)
    buffers.tensors[0].copy_(torch.tensor([1.0, 6.0]))
    statistic.copy_(torch.tensor([0.5, 3.0]))
    buffers.apply(everything(statistic))
    assert statistic.tolist() == [0.0, 5.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=1, max_size=8))
def test_add_change_properties(rows: list[tuple[float, float, float]]) -> None:
    now, before, average = torch.tensor(rows).t().contiguous()
    changed = add_change(now.clone(), before, average, stay_positive=False)
    assert torch.equal(changed[now == before], average[now == before])
    torch.testing.assert_close(changed.double(), now.double() + average.double() - before.double(), rtol=1e-5, atol=1e-2)
    assert torch.equal(add_change(now, now, average, stay_positive=False), average)
    positive = add_change(now.abs(), before.abs(), average.abs(), stay_positive=True)
    assert bool((positive >= 0).all())


def test_a_tensor_that_was_negative_may_become_more_so() -> None:
    changed = add_change(torch.tensor([-1.0]), torch.tensor([2.0]), torch.tensor([0.0]), stay_positive=True)
    assert changed.tolist() == [-3.0]


def test_work_elsewhere_is_queued_on_the_callers_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    story: list[str] = []

    @contextmanager
    def use(stream: str) -> Iterator[None]:
        story.append(f"enter {stream}")
        yield
        story.append(f"leave {stream}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", use)
    devices = ["cuda:1", "cpu", "cuda:0", "cuda:1"]
    tensors = [cast(torch.Tensor, SimpleNamespace(device=torch.device(device))) for device in devices]
    with CallerStreams.of_this_thread(tensors).current():
        story.append("work")
    first, second = "stream of cuda:0", "stream of cuda:1"
    assert story == [f"enter {first}", f"enter {second}", "work", f"leave {second}", f"leave {first}"]


def test_no_streams_without_cuda_tensors() -> None:
    streams = CallerStreams.of_this_thread([torch.zeros(2)])
    assert streams.streams == ()
    with streams.current():
        pass
