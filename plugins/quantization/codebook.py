"""Weights that are 4-bit codes of any sixteen numbers, times scales of groups of columns.

So are those of mxfp4, nvfp4, and bitsandbytes' nf4 and fp4. frame keeps the codes in its one order of nibbles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearMethod, LinearSpec
from frame.layers import WeightSlot

from .packed import require_groups, with_take
from .scaled import WEIGHTS

#: The numbers of 4-bit floats with two bits of exponent and one of mantissa, by their codes.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Floats:
    """How a file stores 4-bit floats: bytes of two codes, the first in the low bits, and a scale for `group` columns.

    `codes` and `scale` are the ends of the names of their tensors. Scales of `scale_dtype` uint8 are exponents of two,
    127 for one. The tensor `number` of each is one float32 that multiplies too, or divides if it `divides`. `unread`
    are the ends of what may be there and is not used.
    """

    codes: str
    scale: str
    group: int
    scale_dtype: torch.dtype
    number: str = ""
    divides: bool = False
    unread: tuple[str, ...] = ()

    @property
    def scales_near(self) -> tuple[float, float]:
        """What made-up scales are near."""
        return (121, 2) if self.scale_dtype == torch.uint8 else (32.0, 16.0)

    @property
    def number_near(self) -> tuple[float, float]:
        """What made-up numbers are near, with which weights are as large as a checkpoint's."""
        number = WEIGHTS / 6 / 32
        return (1 / number if self.divides else number, 0.0)


def nvfp4(codes: str, scale: str, number: str, *, divides: bool = False, unread: tuple[str, ...] = ()) -> Floats:
    """4-bit floats in groups of 16, whose scales are 8-bit floats."""
    return Floats(codes, scale, 16, E4M3, number, divides, unread)


class CodebookLinear(LinearMethod):
    """`layer.packed` int32 [N, K / 8], `layer.scales` [N, K / g], float32 `layer.table` [16].

    With `numbered` `layer.numbers` float32 [N, 1] multiply too.
    """

    def __init__(self, group: int, scale_dtype: torch.dtype, *, numbered: bool = False) -> None:
        self.group, self._scale_dtype, self._numbered = group, scale_dtype, numbered
        self._table: tuple[float, ...] = ()

    def allocate(self, layer: Any, table: tuple[float, ...]) -> None:
        """Gives `layer` its parameters; to be called by `create`."""
        spec: LinearSpec = layer.spec
        require_groups(spec, self.group)
        layer.packed = layer.empty(spec.out_features, spec.width // 8, dtype=torch.int32)
        layer.scales = layer.empty(spec.out_features, spec.width // self.group, dtype=self._scale_dtype)
        layer.numbers = layer.empty(spec.out_features, 1, dtype=torch.float32) if self._numbered else None
        layer.table = layer.empty(16, dtype=torch.float32)
        self._table = table

    def begin_load(self, layer: Any) -> None:
        layer.table.data.copy_(torch.tensor(self._table))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = layer.ops.table_linear(x, layer.packed, layer.scales, layer.table, layer.numbers, bias)
        return out


class FloatLinear(CodebookLinear):
    """A layer of 4-bit floats; those of several tensors keep the numbers of each."""

    def __init__(self, kind: Floats) -> None:
        super().__init__(kind.group, kind.scale_dtype, numbered=bool(kind.number))
        self._kind = kind

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer, FP4)
        return float_slots(self._kind, layer, layer.spec)


def float_slots(kind: Floats, held: Any, spec: LinearSpec) -> list[WeightSlot]:
    """The slots of a linear layer of 4-bit floats whose `packed`, `scales` and `numbers` are those of `held`."""
    slots = with_take(
        WeightSlot.sharded(kind.codes, held.packed, spec, 1, 2, dtype=torch.uint8), partial(put_bytes, held.packed)
    )
    slots += WeightSlot.sharded(
        kind.scale, held.scales, spec, 1, kind.group, dtype=kind.scale_dtype, near=kind.scales_near
    )
    start = 0
    for part in spec.rows:
        slots += [WeightSlot(f"{part.name}.{end}", (), None) for end in kind.unread]
        if kind.number:
            rows = slice(start, start + part.count)
            shape = (1,) if kind.divides else ()
            slot = WeightSlot(f"{part.name}.{kind.number}", shape, held.numbers, (), (rows,), near=kind.number_near)
            slots.append(replace(slot, take=partial(_divide, held.numbers, slot, rows)) if kind.divides else slot)
        start += part.count
    return slots


def put_bytes(packed: Tensor, rows: slice, piece: Tensor) -> None:
    """Takes bytes [rows, K / 2], whose low bits are the first code: as frame's words are."""
    packed.data[rows] = piece.contiguous().view(torch.int32)


def _divide(numbers: Tensor, slot: WeightSlot, rows: slice, piece: Tensor) -> None:
    if not bool((piece > 0).all()):
        raise ValueError(f"{slot.name} must be above 0, got {float(piece.min())}")
    numbers.data[rows] = 1 / piece.float().reshape(1, 1)
