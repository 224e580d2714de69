"""Linear layers whose weights are 8-bit codes times scales of rows, blocks or groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearMethod, LinearSpec, StoredTensor
from frame.layers import WeightSlot
from frame.ops import quantize_rows

#: (center, reach) of made-up codes, and of their scales so that weights are as large as a checkpoint's.
CODES = {torch.int8: (0.0, 127.0), torch.float8_e4m3fn: (0.0, 448.0), torch.float8_e5m2: (0.0, 448.0)}
WEIGHTS = 0.05
#: Types of scales that are powers of two.
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
#: Elements that are rounded at once.
_MOST_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores such weights.

    `dtype` is the type of codes. A scale stands for `block` rows and columns, 0 for all of a tensor; `scale` and
    `input_scale` are the ends of the names of their tensors, the latter "" where activations are dynamic. `zeros` names
    what is subtracted from codes. `flat`: scales of rows are [N], not [N, 1]. `rounds`: activations are meant to be
    rounded as well. `exponents` is the type of scales of blocks that are stored as powers of two.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    scale: str = "weight_scale"
    input_scale: str = ""
    zeros: str = ""
    flat: bool = False
    rounds: bool = False
    exponents: torch.dtype | None = None


class ScaledLinear(LinearMethod):
    """`layer.codes` [N, K], float32 `layer.scales` [⌈N / r⌉, ⌈K / c⌉], where (r, c) is a block.

    A scale of a whole tensor becomes one for each of its rows, so that tensors with scales of their own join exactly.
    Of static scales of activations the largest counts for all tensors that read the same x.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def create(self, layer: Any) -> list[WeightSlot]:
        spec, stored = layer.spec, self.stored
        rows_per, columns_per = stored.block
        self.block = (rows_per or 1, columns_per or spec.width)
        rows = sum(-(-part.count // self.block[0]) for part in spec.rows)
        columns = -(-spec.width // self.block[1])
        layer.codes = layer.empty(spec.out_features, spec.width, dtype=stored.dtype)
        layer.scales = layer.empty(rows, columns, dtype=torch.float32)
        center, reach = CODES[stored.dtype]
        slots = WeightSlot.sharded("weight", layer.codes, spec, dtype=stored.dtype, near=(center, reach))
        slots += self._scale_slots(layer, spec)
        layer.zeros = None
        if stored.zeros:
            layer.zeros = layer.empty(rows, columns, dtype=torch.int8)
            slots += WeightSlot.sharded(
                stored.zeros, layer.zeros, spec, rows_per, columns_per, dtype=torch.int8, near=(0.0, 0.0)
            )
        layer.input_scale = None
        if stored.input_scale:
            layer.input_scale = layer.empty(len(spec.rows), dtype=torch.float32)
            slots += [
                WeightSlot(name, (), layer.input_scale, region=(slice(i, i + 1),), near=(0.02, 0))
                for i, name in enumerate(f"{part.name}.{stored.input_scale}" for part in spec.rows)
            ]
        return slots

    def _scale_slots(self, layer: Any, spec: LinearSpec) -> list[WeightSlot]:
        stored, (rows_per, columns_per) = self.stored, self.stored.block
        size = WEIGHTS / CODES[stored.dtype][1]
        near = (size, size / 4)
        if rows_per:
            if stored.flat:
                return [
                    replace(slot, take=partial(_rows_of, layer.scales, slot.region))
                    for slot in WeightSlot.sharded(stored.scale, layer.scales, spec, 1, None, near=near)
                ]
            slots = WeightSlot.sharded(stored.scale, layer.scales, spec, rows_per, columns_per, near=near)
            return with_exponents(slots, stored.exponents)
        slots, start = list[WeightSlot](), 0
        for part in spec.rows:
            region = (slice(start, start + part.count),)
            slots.append(WeightSlot(f"{part.name}.{stored.scale}", (), layer.scales, (), region, near=near))
            start += part.count
        return slots

    def finish_load(self, layer: Any) -> None:
        if layer.input_scale is not None:
            layer.input_scale.fill_(layer.input_scale.amax())

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        static = None if layer.input_scale is None else layer.input_scale[:1]
        given = layer.codes, layer.scales, self.block, bias, layer.zeros, static
        out: Tensor = layer.ops.scaled_linear(x, *given, rounds=self.stored.rounds)
        return out


class RoundedLinear(LinearMethod):
    """As `ScaledLinear`, of weights that come in 16 or 32 bits: each row is divided by its own largest value.

    Activations are rounded too where codes are floats, which lose little by it.
    """

    block = (1, 0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._rounds = dtype, dtype.is_floating_point

    def create(self, layer: Any) -> list[WeightSlot]:
        spec = layer.spec
        self.block = (1, spec.width)
        layer.codes = layer.empty(spec.out_features, spec.width, dtype=self.dtype)
        layer.scales = layer.empty(spec.out_features, 1, dtype=torch.float32)
        return rounded_slots(layer, spec, layer.codes, partial(self.round, layer))

    def round(self, layer: Any, rows: slice, weight: Tensor) -> None:
        """Puts rows of the weight into place."""
        codes, scales = quantize_rows(weight, self.dtype)
        layer.codes[rows], layer.scales[rows] = codes, scales

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        given = layer.codes, layer.scales, self.block, bias
        out: Tensor = layer.ops.scaled_linear(x, *given, rounds=self._rounds)
        return out


def rounded_slots(
    layer: Any, spec: LinearSpec, codes: Tensor, round_: Callable[[slice, Tensor], None]
) -> list[WeightSlot]:
    """The slots of unquantised weights, given to `round_(rows, weight)` as [rows, columns] when they arrive."""
    slots = WeightSlot.sharded("weight", codes, spec, transposed=spec.transposed)

    def take(rows: slice, piece: Tensor) -> None:
        weight = piece.t() if spec.transposed else piece
        with torch.no_grad():
            for some in runs_of_rows(weight):
                round_(slice(rows.start + some.start, rows.start + some.stop), weight[some])

    return [replace(slot, take=partial(take, slot.region[0])) for slot in slots]


def runs_of_rows(weight: Tensor) -> list[slice]:
    """The rows of [rows, columns] in runs whose copies in float32 take little memory beside the weight."""
    step = max(1, _MOST_AT_ONCE // max(1, weight.shape[1]))
    return [slice(first, min(first + step, len(weight))) for first in range(0, len(weight), step)]


def _rows_of(scales: Tensor, region: tuple[slice, ...], piece: Tensor) -> None:
    scales.data[region] = piece[:, None].float()


def exponent_type(tensors: Mapping[str, StoredTensor], name: str) -> torch.dtype | None:
    """The type of a checkpoint's scales where they are stored as powers of two (E8M0): one byte x is 2^(x - 127)."""
    found = tensors.get(name)
    return found.dtype if found is not None and found.dtype in EXPONENTS else None


def with_exponents(slots: list[WeightSlot], dtype: torch.dtype | None) -> list[WeightSlot]:
    """The slots of float32 scales, filled with powers of two from tensors of `dtype`; as they are where that is None.

    Every power of two that a byte names is a float32, and its 255 is NaN: nothing is rounded.
    """
    if dtype is None:
        return slots
    return [replace(slot, dtype=dtype, take=partial(_take_exponents, slot), near=(117, 1)) for slot in slots]


def _take_exponents(slot: WeightSlot, piece: Tensor) -> None:
    replace(slot, take=None).write(piece.view(torch.float8_e8m0fnu).float())
