"""Tensors of GPTQ and AWQ: [in, out], with codes of few bits packed into int32 along one of the two.

A share may begin within a word, which then two ranks read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearSpec
from frame.layers import Rows, WeightSlot

from .packing import unpack

#: Rows of W that are unpacked at a time, so that little lies beside the result.
_ROWS = 256
#: Takes rows of W and their codes, uint8 [rows, columns].
Put = Callable[[slice, Tensor], None]


def words(start: int, stop: int, total: int, bits: int) -> tuple[slice, int, int]:
    """(the words with codes `start` to `stop`, codes before the first in them, all words) of `total` codes."""
    unit = 32 // gcd(32, bits)  # codes that fill whole words
    per, size = unit * bits // 32, -(-total * bits // 32)
    first = start // unit
    return slice(first * per, min(-(-stop // unit) * per, size)), start - first * unit, size


def runs_of(spec: LinearSpec) -> list[tuple[Rows, slice]]:
    """Each run of rows of a layer, and where it lies in the layer's weight."""
    found, start = [], 0
    for part in spec.rows:
        found.append((part, slice(start, start + part.count)))
        start += part.count
    return found


def along_columns(name: str, parameter: Tensor, spec: LinearSpec, bits: int, put: Put) -> list[WeightSlot]:
    """The slots of "PART.name" int32 [K · bits / 32, N]."""
    index, lead, size = words(spec.columns.start, spec.columns.stop, spec.in_features, bits)

    def take(region: slice, piece: Tensor) -> None:
        for first in range(0, piece.shape[1], _ROWS):
            codes = unpack(piece[:, first : first + _ROWS].t(), bits, lead + spec.width)[:, lead:]
            put(slice(region.start + first, region.start + first + len(codes)), codes)

    slots = []
    for part, region in runs_of(spec):
        own = (index, slice(part.start, part.start + part.count))
        slots.append(
            WeightSlot(
                f"{part.name}.{name}", (size, part.total), parameter, own, dtype=torch.int32, take=partial(take, region)
            )
        )
    return slots


def along_rows(
    name: str, parameter: Tensor, spec: LinearSpec, bits: int, columns: tuple[slice, int], put: Put,
    order: Sequence[int] = (),
) -> list[WeightSlot]:  # fmt: skip
    """The slots of "PART.name" int32 [columns, N · bits / 32]; `columns` are this rank's, and how many all are."""

    def take(region: slice, lead: int, piece: Tensor) -> None:
        count = region.stop - region.start
        per = 32 // gcd(32, bits) * 32  # codes that fill whole words
        for first in range(0, lead + count, per):
            own = piece[:, first * bits // 32 : (first + per) * bits // 32]
            codes = unpack(own, bits, own.shape[1] * 32 // bits, order)[:, : lead + count - first]
            skipped = max(0, lead - first)
            start = region.start + first + skipped - lead
            rows = codes[:, skipped:].t()
            put(slice(start, start + len(rows)), rows)

    slots = []
    for part, region in runs_of(spec):
        index, lead, size = words(part.start, part.start + part.count, part.total, bits)
        taken = partial(take, region, lead)
        slots.append(
            WeightSlot(
                f"{part.name}.{name}",
                (columns[1], size),
                parameter,
                (columns[0], index),
                dtype=torch.int32,
                take=taken,
            )
        )
    return slots


def group_columns(spec: LinearSpec, group: int) -> tuple[slice, int]:
    """(the groups of this rank's columns, all groups) where `group` columns make one, 0 for one of all."""
    if not group:
        return slice(0, 1), 1
    return slice(spec.columns.start // group, -(-spec.columns.stop // group)), -(-spec.in_features // group)


def unused_biases(spec: LinearSpec, held: Any) -> list[WeightSlot]:
    """Biases that writers add to layers without one: they must be zeros, which nobody needs."""

    def take(name: str, piece: Tensor) -> None:
        if bool(piece.any()):
            raise ValueError(f"{name} is not zero, and the model adds no bias there")

    names = [] if spec.bias else [(part, f"{part.name}.bias") for part in spec.rows]
    return [
        WeightSlot(name, (part.total,), held, optional=True, take=partial(take, name), near=(0.0, 0.0))
        for part, name in names
    ]
