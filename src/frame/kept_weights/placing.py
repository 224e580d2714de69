"""Has tensors that a model allocates lie in held memory, and knows where each lies. Knows no checkpoint."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frame.core.interfaces.held_memory import HeldMemory

#: Bytes from which on a tensor is used where it lies in held memory. Smaller ones are copied: layers may write to them
#: when they are made, as to orders of columns and tables.
LARGE_BYTES = 512 << 10


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a tensor lies: `part` of the held memory and the `offset` in it in bytes; part -1: it is a copy."""

    name: str
    part: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Placing(TorchFunctionMode):
    """Within it `torch.empty` for a device gives parts of held memory, in the order of the calls.

    Only calls that name the device and at most a type are served. The same code in another process gets the same
    parts, so that what it allocates holds what was written there.
    """

    def __init__(self, memory: HeldMemory, device: torch.device) -> None:
        super().__init__()
        self._memory, self._device = memory, device
        self.parts: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.keys() <= {"dtype", "device"} and self._serves(kwargs.get("device")):
            sizes = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if num_bytes := prod(sizes) * dtype.itemsize:
                self.parts.append(self._memory.take(num_bytes))
                return self.parts[-1].view(dtype).view(tuple(sizes))
        return func(*args, **kwargs)

    def _serves(self, device: Any) -> bool:
        return device is not None and torch.device(device) == self._device

    def places(self, tensors: Mapping[str, Tensor]) -> list[Place]:
        """Where each of the tensors lies that `torch.empty` gave."""
        order = sorted(range(len(self.parts)), key=lambda part: self.parts[part].data_ptr())
        starts = [self.parts[part].data_ptr() for part in order]
        found = []
        for name, tensor in tensors.items():
            index = bisect_right(starts, tensor.data_ptr()) - 1
            part, offset = -1, 0
            if index >= 0 and tensor.data_ptr() + tensor.nbytes <= starts[index] + len(self.parts[order[index]]):
                large = len(self.parts[order[index]]) >= LARGE_BYTES and tensor.is_contiguous()
                part, offset = (order[index], tensor.data_ptr() - starts[index]) if large else (-1, 0)
            kind = str(tensor.dtype).removeprefix("torch.")
            found.append(Place(name, part, offset, kind, tuple(tensor.shape), tensor.stride()))
        return found

    def tensor(self, place: Place) -> Tensor:
        """The tensor at a place of a part."""
        dtype: torch.dtype = getattr(torch, place.dtype)
        num_bytes = prod(place.shape) * dtype.itemsize
        return self.parts[place.part][place.offset : place.offset + num_bytes].view(dtype).view(place.shape)
