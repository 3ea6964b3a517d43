"""What tensors an averager takes: checked once, when they are listed, with an error that names the offender."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from swarmavg.compression.interface import TensorInfo

AVERAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, all of which can be averaged in place. Raises `TypeError` or `ValueError`."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError("tensors must be a sequence of tensors, got one tensor: write [tensor]")
    checked = tuple(tensors)
    for index, tensor in enumerate(checked):
        _check_tensor(f"tensors[{index}]", tensor)
    _check_memory(checked)
    return checked


def check_infos(infos: Sequence[TensorInfo] | None, tensors: Sequence[torch.Tensor]) -> tuple[TensorInfo, ...]:
    """One `TensorInfo` per tensor: those given, if they fit, else derived ones. Raises `TypeError` or `ValueError`."""
    if infos is None:
        return tuple(TensorInfo.of(tensor, index) for index, tensor in enumerate(tensors))
    given = tuple(infos)
    if len(given) != len(tensors):
        raise ValueError(f"tensor_infos must have one entry per tensor: got {len(given)} for {len(tensors)} tensors")
    for index, (info, tensor) in enumerate(zip(given, tensors, strict=True)):
        if not isinstance(info, TensorInfo):
            raise TypeError(f"tensor_infos[{index}] must be a TensorInfo, got {info!r}")
        if info.shape != tuple(tensor.shape) or info.dtype != tensor.dtype:
            raise ValueError(
                f"tensor_infos[{index}] says {info.shape} {info.dtype}, the tensor is {tuple(tensor.shape)} {tensor.dtype}"
            )
    return given


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.grad_fn is not None:
        raise ValueError(f"{name} has a grad_fn ({tensor.grad_fn}): only leaf tensors are averaged in place; detach it")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on device {tensor.device}: tensors must be on the CPU")
    if tensor.dtype not in AVERAGED_DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}: only {', '.join(map(str, AVERAGED_DTYPES))} can be averaged")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}: only dense tensors can be averaged")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)) and tensor.numel():
        raise ValueError(f"{name} is an expanded view (stride {tensor.stride()}): clone it, it cannot be written to")


def _check_memory(tensors: Sequence[torch.Tensor]) -> None:
    """No element may be listed twice: it would be averaged twice, and hold whatever was written last."""
    extents = sorted((*_extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
    cluster: list[int] = []
    end = 0
    for first, last, index in extents:
        if cluster and first >= end:
            _check_cluster(tensors, cluster)
            cluster = []
        cluster.append(index)
        end = max(end, last)
    _check_cluster(tensors, cluster)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _check_cluster(tensors: Sequence[torch.Tensor], indices: Sequence[int]) -> None:
    """Tensors whose extents overlap may still be disjoint, as columns of a matrix are: mark every byte and count."""
    if all(tensors[index].is_contiguous() for index in indices) and len(indices) < 2:  # noqa: PLR2004
        return
    start = min(_extent(tensors[index])[0] for index in indices)
    marks = torch.zeros(max(_extent(tensors[index])[1] for index in indices) - start, dtype=torch.bool, device="cpu")
    for index in indices:
        tensor = tensors[index]
        width = tensor.element_size()
        strides = [stride * width for stride in tensor.stride()]
        bytes_of_it = marks.as_strided((*tensor.shape, width), (*strides, 1), tensor.data_ptr() - start)
        if bytes_of_it.any():
            other = _overlapping(tensors, indices, index)
            raise ValueError(f"tensors[{index}] shares memory with tensors[{other}]: list every element once")
        bytes_of_it.fill_(True)  # noqa: FBT003
        if int(marks.as_strided(marks.shape, (1,), 0).count_nonzero()) != _bytes_up_to(tensors, indices, index):
            raise ValueError(f"tensors[{index}] overlaps itself (stride {tensor.stride()}): clone it, it cannot be written to")


def _bytes_up_to(tensors: Sequence[torch.Tensor], indices: Iterable[int], last: int) -> int:
    listed = itertools.chain(itertools.takewhile(lambda index: index != last, indices), [last])
    return sum(tensors[index].numel() * tensors[index].element_size() for index in listed)


def _overlapping(tensors: Sequence[torch.Tensor], indices: Sequence[int], index: int) -> int:
    """The first listed before `index` whose extent meets its own: for the message."""
    first, last = _extent(tensors[index])
    return next(other for other in indices if _extent(tensors[other])[0] < last and _extent(tensors[other])[1] > first)
