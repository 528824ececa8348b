"""CUDA tensors without data and without a GPU, for what must hold of code that a CUDA graph will capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside with ``device="cuda"`` have shape, dtype and device, and nothing else."""
    with FakeTensorMode(), _WithoutDeviceGuard():
        yield


class NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold: numbers read back, shapes that depend on data, tensors off the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape):
            assert tag not in func.tags, f"{func}: {tag}"
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            assert not isinstance(one, Tensor) or one.device.type == "cuda", f"{func} gave a tensor on {one.device}"
        return result


class _WithoutDeviceGuard(TorchFunctionMode):
    """Spells some operators otherwise: torch's take a CUDA device guard, which a build for CPUs does not have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _view(*args)
        if func is Tensor.__setitem__:
            tensor, index, value = args
            part = _view(tensor, index)
            return aten.copy_(part, value) if isinstance(value, Tensor) else aten.fill_(part, value)
        if func is Tensor.__invert__:
            return aten.bitwise_not(*args)
        if func is Tensor.copy_:
            return aten.copy_(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _view(tensor: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    gap = parts.index(Ellipsis)
    named = sum(part is not None for part in parts) - 1
    parts[gap : gap + 1] = [slice(None)] * (tensor.dim() - named)
    axis = 0
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(axis)
        elif isinstance(part, int):
            tensor = tensor.select(axis, part)
            continue
        elif isinstance(part, slice):
            start, stop, step = part.indices(tensor.shape[axis])
            tensor = aten.slice(tensor, axis, start, stop, step)
        else:
            raise TypeError(f"{part!r}: only None, whole numbers and slices index a pretended tensor")
        axis += 1
    return tensor
