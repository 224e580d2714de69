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

_ALL = slice(None)
#: Elements that are copied at once, at most: the rows of a larger tensor are filled in blocks.
_MOST = (1 << 22) - 1
#: At least so many values are shared, as a power of 2.
_FEWEST_BITS = 16
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


class DummyLoader(WeightLoader):
    """Small random values, made on the parameter's device from the seed, the tensor's name and the element's place.

    Each block of a tensor is copied from its own place among values that all share: one launch for each of thousands of
    experts, where making its values would take twenty.
    """

    def __init__(self, setup: LoaderSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._shared = cache(_made)

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
        near = near or _usual(name, part, shape)
        self._copy(f"{self.setup.seed} {name}", part, shape, [*index, *(_ALL,) * (len(shape) - len(index))], near)

    def _copy(
        self, name: str, part: Tensor, shape: Sequence[int], taken: Sequence[slice], near: tuple[float, float] | None
    ) -> None:
        """Fills `part`, what is `taken` of a tensor of that shape, block after block of the tensor's rows."""
        (num_rows, *inner), (rows, *others) = shape, taken
        size, left = prod(inner), range(num_rows)[rows]
        if size > _MOST:
            for row, one in zip(left, part, strict=True):
                self._copy(f"{name} {row}", one, inner, others, near)
            return
        block_rows = min(_MOST // size, num_rows)
        count = block_rows * size
        values = self._shared(max(_FEWEST_BITS, count.bit_length() + 1), near, part.dtype, part.device)
        start = zlib.crc32(name.encode()) % (len(values) - count - num_rows // block_rows)
        while left:
            block, first = divmod(left[0], block_rows)
            here = left[: len(range(left[0], (block + 1) * block_rows, left.step))]
            place = start + block  # one further for each block, else rows of two blocks could be equal
            source = values[place : place + count].view(block_rows, *inner)
            target, part = part.split([len(here), len(left) - len(here)])
            target.copy_(source[(slice(first, first + here[-1] - here[0] + 1, left.step), *others)])
            left = left[len(here) :]


def _usual(name: str, part: Tensor, shape: Sequence[int]) -> tuple[float, float] | None:
    """(center, reach) of the values of a tensor of which nothing else is known; None for integers, which may be any."""
    if not part.is_floating_point():
        return None
    return (0.0, 0.05) if len(shape) > 1 else (0.0, 0.01) if name.endswith("bias") else (1.0, 0.1)


def _made(num_bits: int, near: tuple[float, float] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
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
