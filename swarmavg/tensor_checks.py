"""What tensors an averager takes: checked once, when they are listed, with an error that names the offender."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarmavg.compression.interface import TensorInfo

AVERAGED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensors(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, all of which can be averaged in place. Raises `TypeError` or `ValueError`."""
    if isinstance(tensors, torch.Tensor):
        raise TypeError("tensors must be a sequence of tensors, got one tensor: write [tensor]")
    checked = tuple(tensors)
    if not checked:
        raise ValueError("tensors is empty: there is nothing to average")
    for index, tensor in enumerate(checked):
        _check_tensor(f"tensors[{index}]", tensor)
    check_memory([(f"tensors[{index}]", tensor) for index, tensor in enumerate(checked)])
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


def check_memory(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """No element may be listed twice: it would be averaged twice, and hold whatever was written last.

    For strided tensors of any device. Raises `ValueError` with the names of those that share memory.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        if not tensor.numel():
            continue
        if _overlaps_itself(tensor):
            raise ValueError(f"{name} is an expanded view (stride {tensor.stride()}): clone it, it cannot be written to")
        by_device.setdefault(tensor.device, []).append((name, tensor))
    for neighbours in by_device.values():
        _check_one_memory(neighbours)


def _check_one_memory(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    extents = sorted((*_extent(tensor), index) for index, (_, tensor) in enumerate(named))
    cluster: list[int] = []
    end = 0
    for first, last, index in extents:
        if cluster and first >= end:
            _check_cluster(named, cluster)
            cluster = []
        cluster.append(index)
        end = max(end, last)
    _check_cluster(named, cluster)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (span + 1) * tensor.element_size()


def _check_cluster(named: Sequence[tuple[str, torch.Tensor]], indices: Sequence[int]) -> None:
    """Tensors whose extents overlap may still be disjoint, as columns of a matrix are: mark the bytes of each."""
    if len(indices) <= 1:
        return
    start = min(_extent(named[index][1])[0] for index in indices)
    marks = torch.zeros(max(_extent(named[index][1])[1] for index in indices) - start, dtype=torch.bool, device="cpu")
    for index in sorted(indices):
        name, tensor = named[index]
        own_bytes = _mark(marks, tensor, start)
        if own_bytes.any():
            raise ValueError(f"{name} shares memory with tensors listed before it: list every element once")
        own_bytes.fill_(value=True)


def _mark(marks: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
    """The bytes of a tensor, in a map of the memory from address `start` on."""
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, width), (*strides, 1), tensor.data_ptr() - start)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices are one element, as in expanded and unfolded views."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False  # each dimension steps over all smaller ones: the usual case, known without looking at every element
    first, last = _extent(tensor)
    marks = torch.zeros(last - first, dtype=torch.bool, device="cpu")
    _mark(marks, tensor, first).fill_(value=True)
    return int(marks.count_nonzero()) != tensor.numel() * tensor.element_size()
