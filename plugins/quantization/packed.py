"""Linear layers whose weights are 4-bit codes times scales of groups of columns, in frame's one layout.

Formats derive from `PackedLinear`: they list the tensors of their files, and unpack what is in another order by `take`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearMethod, LinearSpec
from frame.layers import WeightSlot
from frame.ops import unpack_nibbles

from .packing import pack_nibbles, unpack
from .scaled import WEIGHTS, rounded_slots

#: What made-up scales are near: codes are up to 8 away from their zero.
SCALES = (WEIGHTS / 8, WEIGHTS / 32)


def require_groups(spec: LinearSpec, group_size: int) -> int:
    """The columns of a group in this rank's share, for groups of `group_size` columns, 0 for one of all.

    Raises `ValueError` where the share cuts a group, or has columns that fill no word.
    """
    size = group_size or spec.width
    if spec.width % 8 or spec.width % size or spec.columns.start % size:
        raise ValueError(
            f"{spec.prefix}: this rank holds columns {spec.columns.start} to {spec.columns.stop} of "
            f"{spec.in_features}, which cut groups of {size} columns, or words of 8; "
            "divide the model over fewer devices"
        )
    return size


class PackedLinear(LinearMethod):
    """`layer.packed` int32 [N, K / 8], `layer.scales` [N, K / g], `layer.zeros` uint8 [N, K / g] or None for 8.

    With `ordered` a group is a set of columns, which "PART.g_idx" or the like names: int32 [K], given to `g_idx`. The
    columns are then sorted by group when all have arrived, and x is read in the order `layer.order`. A share of the
    columns of such a layer keeps all scales, and its weight is put together for each product.
    """

    def __init__(self, group_size: int, *, zeros: bool = False, ordered: bool = False) -> None:
        self.group_size, self._has_zeros, self._ordered = group_size, zeros, ordered

    def allocate(self, layer: Any, scale_dtype: torch.dtype | None = None) -> None:
        """Gives `layer` its parameters; to be called by `create`."""
        spec: LinearSpec = layer.spec
        self.divided = self._ordered and spec.width != spec.in_features
        columns = spec.in_features if self.divided else spec.width
        size = (self.group_size or columns) if self.divided else require_groups(spec, self.group_size)
        groups = columns // size
        layer.packed = layer.empty(spec.out_features, spec.width // 8, dtype=torch.int32)
        layer.scales = layer.empty(spec.out_features, groups, dtype=scale_dtype)
        layer.zeros = layer.empty(spec.out_features, groups, dtype=torch.uint8) if self._has_zeros else None
        layer.order = layer.groups = None
        if self._ordered:
            numbers = torch.arange(spec.columns.start, spec.columns.stop, dtype=torch.int32, device=layer.device)
            layer.groups = layer.empty(spec.width, dtype=torch.int32)
            layer.groups.data.copy_(numbers // size)
            layer.order = layer.empty(spec.width, dtype=torch.int32)
            layer.order.data.copy_(numbers - spec.columns.start)

    def begin_load(self, layer: Any) -> None:
        """Puts the columns back into the checkpoint's order, into which tensors are loaded."""
        if self._ordered and not self.divided:
            self._reorder(layer, torch.argsort(layer.order))
            layer.order.copy_(torch.arange(len(layer.order), device=layer.device))

    def finish_load(self, layer: Any) -> None:
        """Sorts the columns by group."""
        if self._ordered and not self.divided:
            counts = torch.bincount(layer.groups, minlength=layer.scales.shape[1])
            if not bool((counts == len(layer.groups) // layer.scales.shape[1]).all()):
                raise ValueError(
                    f"{layer.spec.prefix}: its g_idx names groups of unlike sizes, {counts.tolist()[:8]}, …"
                )
            layer.order.copy_(torch.argsort(layer.groups, stable=True))
            self._reorder(layer, layer.order)

    @staticmethod
    def _reorder(layer: Any, order: Tensor) -> None:
        for some in layer.packed.split(512):
            some.copy_(pack_nibbles(unpack_nibbles(some)[:, order.long()]))

    def weight(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """[N, K] in the checkpoint's order of columns, of a share of a layer with ordered groups."""
        groups = layer.groups.long()
        codes = unpack_nibbles(layer.packed).float()
        zeros = 8.0 if layer.zeros is None else layer.zeros[:, groups].float()
        weight: Tensor = (codes - zeros) * layer.scales[:, groups].float()
        return weight.to(dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.order is not None and self.divided:
            joined: Tensor = layer.ops.linear(x, self.weight(layer, x.dtype), bias)
            return joined
        if layer.order is not None:
            x = x.index_select(-1, layer.order)
        out: Tensor = layer.ops.packed_linear(x, layer.packed, layer.scales, layer.zeros, bias)
        return out

    def scale_units(self, layer: Any) -> int:
        """Columns that a stored scale stands for, as `WeightSlot.sharded` takes them: 0 for all."""
        return 0 if self.divided and not self.group_size else self.group_size


def all_groups(spec: LinearSpec) -> LinearSpec:
    """The layer with all columns: whose groups a share keeps where they are sets of columns."""
    return replace(spec, columns=slice(0, spec.in_features))


class RoundedPacked(PackedLinear):
    """Weights that come in 16 or 32 bits, rounded to the nearest of 16 values in each group of columns."""

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer)
        return rounded_slots(layer, layer.spec, layer.packed, partial(self.round, layer))

    def round(self, layer: Any, rows: slice, weight: Tensor) -> None:
        """Puts rows of the weight into place."""
        codes, scales = round_groups(weight, layer.scales.shape[1])
        layer.packed[rows], layer.scales[rows] = pack_nibbles(codes), scales.to(layer.scales.dtype)


def round_groups(weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., K] around 8, float32 scales [..., groups]) of weights [..., K], symmetric in each group."""
    wide = weight.float().unflatten(-1, (groups, -1))
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7
    codes = (wide / scales).round_().clamp_(-8, 7).add_(8)
    return codes.flatten(-2).to(torch.uint8), scales.squeeze(-1)


def zeros_by_rows(layer: Any, first_row: int, bits: int, move: int, piece: Tensor) -> None:
    """Takes zero points that are packed along rows, int32 [n · bits / 32, groups]; `move` is added to each."""
    count = min(piece.shape[0] * 32 // bits, len(layer.zeros) - first_row)
    found = unpack(piece.t(), bits, count).t().to(torch.int16) + move
    layer.zeros.data[first_row : first_row + count] = found.to(layer.zeros.dtype)


def with_take(slots: list[WeightSlot], take: Callable[[slice, Tensor], None]) -> list[WeightSlot]:
    """The slots, whose pieces are given to `take(units of rows, piece)`."""
    return [replace(slot, take=partial(take, slot.region[0])) for slot in slots]
