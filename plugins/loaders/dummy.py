"""Random weights for a checkpoint that has none: benchmarks, and models whose weights arrive later."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LazyTensor, LoaderSetup, WeightLoader

#: Elements made at once: on a CPU as many as stay in its cache, on devices enough to keep them busy.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24
#: More rows than these are numbered on the device.
_MANY_ROWS = 1 << 16
_ALL = slice(None)
#: Tensors of up to so many elements share values, of which there are at least so many (as a power of 2).
_MOST_SHARED, _FEWEST_BITS = 1 << 22, 16
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


class DummyLoader(WeightLoader):
    """Small random values, made on the parameter's device from the seed, the tensor's name and the element's place.

    Small tensors, such as experts by the thousand, are copied each from its own place among values that all share: one
    launch in the place of twenty.
    """

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._kept: dict[tuple[tuple[int, ...], tuple[range, ...], torch.device], Tensor] = {}
        self._shared = cache(_values)

    def supports(self, folder: Path) -> str | None:
        del folder
        return None if self.setup.named else "random weights are made only when asked for by name"

    def tensors(self) -> Iterator[LazyTensor]:
        return iter(())

    @property
    def complete(self) -> bool:
        return False

    def fill(
        self,
        name: str,
        part: Tensor,
        shape: Sequence[int],
        index: tuple[slice, ...] = (),
        near: tuple[float, float] | None = None,
    ) -> None:
        """Matrices around 0, norm weights around 1, biases small: activations keep their scale through the layers.

        Integers are of any value, if it is not said what they are near.

        Nothing but `part` is made, so that ranks which divide a tensor in any way hold parts of the same one.
        """
        if not part.numel():
            return
        if not shape:  # one number
            part.fill_(near[0] if near else 1)
            return
        near, key = near or _usual(name, part, shape), zlib.crc32(f"{self.setup.seed} {name}".encode())
        if (count := prod(shape)) <= _MOST_SHARED:
            values = self._shared(max(_FEWEST_BITS, count.bit_length() + 1), near, part.dtype, part.device)
            start = key % (len(values) - count)
            part.copy_(values[start : start + count].view(*shape)[tuple(index)])
            return
        taken = [*index, *(_ALL,) * (len(shape) - len(index))]
        axes = zip(shape, taken, strict=True)
        *leading, columns = (range(size)[places] for size, places in axes)
        rows = self._numbered(shape[:-1], tuple(leading), part.device)
        keys = _mix(torch.atleast_1d(rows + _wrapped(key)))
        numbers = self._numbered(shape[-1:], (columns,), part.device)
        _fill(part, keys.view(rows.shape), numbers, near)

    def _numbered(self, sizes: Sequence[int], taken: tuple[range, ...], device: torch.device) -> Tensor:
        """int32 numbers, modulo 2^32, of the places that are taken of an array of these sizes.

        Kept, since experts by the thousand have the same ones: to copy them to a device would wait for it each time.
        """
        key = tuple(sizes), taken, device
        if (found := self._kept.get(key)) is None:
            where = device if prod(map(len, taken)) > _MANY_ROWS else torch.device("cpu")
            found = torch.zeros((), dtype=torch.int64, device=where)
            for size, places in zip(sizes, taken, strict=True):
                found = found[..., None] * size + torch.arange(places.start, places.stop, places.step, device=where)
            found = self._kept[key] = found.to(torch.int32).to(device)
        return found


def _wrapped(number: int) -> int:
    """The int32 that is equal modulo 2^32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _usual(name: str, part: Tensor, shape: Sequence[int]) -> tuple[float, float] | None:
    """(center, reach) of the values of a tensor of which nothing else is known; None for integers, which may be any."""
    if not part.is_floating_point():
        return None
    return (0.0, 0.05) if len(shape) > 1 else (0.0, 0.01) if name.endswith("bias") else (1.0, 0.1)


def _fill(part: Tensor, keys: Tensor, columns: Tensor, near: tuple[float, float] | None) -> None:
    """part[…, c] = center + reach · u(keys[…], columns[c]), u in [-1, 1]; `keys` and `columns` int32.

    Without `near` the lowest bits of what u is made from.
    """
    if part.dim() > 2 and part.is_contiguous():
        part, keys = part.flatten(0, -2), keys.flatten()
    elif part.dim() > 2:
        for one, its_keys in zip(part, keys, strict=True):
            _fill(one, its_keys, columns, near)
        return
    chunk = _CPU_CHUNK if part.device.type == "cpu" else _DEVICE_CHUNK
    step = max(1, chunk // max(1, len(columns)))
    for target, some in zip(torch.atleast_2d(part).split(step), torch.atleast_1d(keys).split(step), strict=True):
        target.copy_(_scaled(_mix(some[:, None] + columns), near, part.is_floating_point()))


def _values(num_bits: int, near: tuple[float, float] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """2 ** `num_bits` values, as of the row of a tensor; fewer are the first ones of more."""
    bits = _mix(torch.arange(1 << num_bits, dtype=torch.int32, device=device))
    return _scaled(bits, near, dtype.is_floating_point).to(dtype)


def _scaled(bits: Tensor, near: tuple[float, float] | None, is_floating_point: bool) -> Tensor:
    """Values that are `near` (center, reach), whole ones for integers; the bits where nothing is said."""
    if near is None:
        return bits
    center, reach = near
    values = bits.float().mul_(reach * 2.0**-31)
    values = values.add_(center) if center else values
    return values if is_floating_point else values.round_()


def _mix(x: Tensor) -> Tensor:
    """The lowbias32 mixer (Wellons 2018) of contiguous int32, in place; arithmetic wraps, shifts are logical."""
    low, high = x.view(torch.int16).view(*x.shape, 2).unbind(-1)
    low ^= high  # x ^= x >> 16
    x *= _MIX_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MIX_2
    low ^= high
    return x
