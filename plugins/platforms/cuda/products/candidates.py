"""The kernels that can multiply rows with a weight, by name, and which of them are measured for a product.

A product is its shape: rows, outputs and inputs of the weight, and whether the halves of its outputs are gated. Knows
no times and no layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from frame.kernels import linear as one_row
from frame.kernels.activation import silu_mul
from frame.kernels.hopper import hopper_kernel, is_copied, is_hopper

from . import library

#: (x, weight, bias) → the product, gated where that was asked for.
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
#: What serves any product, on any device.
CUBLAS, CUBLASLT = LIBRARY = ("cublas", "cublaslt")
#: Our own products by the most rows that they are worth a measurement for. Of one row: outputs of a program, inputs of
#: its tile, warps; of some: warps and steps on their way; of many: outputs of a tile.
ONE_ROW = {"one-2x2048x2": (2, 2048, 2), "one-2x1024x2": (2, 1024, 2), "one-8x512x4": (8, 512, 4)}
ONE_GATED_ROW = {"one-2x1024x2": (2, 1024, 2), "one-4x512x2": (4, 512, 2)}
SOME_ROWS = {"rows-4x4": (4, 4), "rows-4x6": (4, 6), "rows-8x4": (8, 4)}
MANY_ROWS = {"tiles-256": 256, "tiles-128": 128}
MOST_SOME_ROWS, LEAST_MANY_ROWS = 16, 65


@dataclass(frozen=True)
class Shape:
    """The weight of a product, [outputs, inputs] in the file's order, and whether its halves are gated."""

    outputs: int
    inputs: int
    gated: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.outputs}x{self.inputs}{'-gated' * self.gated}-{kind}"


def names(rows: int, shape: Shape, *, hopper: bool) -> list[str]:
    """The candidates for so many rows; the library's always, and first."""
    found = [CUBLAS, CUBLASLT]
    if rows == 1:
        found += ONE_GATED_ROW if shape.gated else ONE_ROW
    if not hopper or shape.dtype not in (torch.bfloat16, torch.float16):
        return found
    if 2 <= rows <= MOST_SOME_ROWS and shape.inputs % 64 == 0:
        few = rows <= 8
        found += [name for name in SOME_ROWS if few or name != "rows-8x4"]
        if shape.gated:  # of a gate and a factor more steps on their way leave fewer programs on a multiprocessor
            found = found[:2] + ["rows-4x4"] * few
    aligned = shape.inputs % 8 == 0 and shape.outputs % (16 if shape.gated else 8) == 0  # rows at multiples of 16 bytes
    if rows >= LEAST_MANY_ROWS and aligned:
        found += MANY_ROWS
    return found


def candidates(rows: int, shape: Shape, device: torch.device) -> dict[str, Product]:
    """Those of `names` that this device, and this Triton, can run."""
    found = ((name, product(name, device, shape.gated)) for name in names(rows, shape, hopper=is_hopper(device)))
    return {name: call for name, call in found if call is not None}


def without_times(rows: int, known: Collection[str]) -> str:
    """The candidate of `known` for a product that was not measured: ours for up to 8 rows, else the library's."""
    preferred = ("one-2x2048x2", "one-2x1024x2", "rows-4x6", "rows-4x4") if rows <= 8 else ()
    return next((name for name in preferred if name in known), CUBLAS)


def is_served(name: str, x: Tensor, weight: Tensor) -> bool:
    """Whether a candidate of ours can read rows and weight as they lie; the library can in any case."""
    if x.dtype != weight.dtype or x.stride(1) != 1 or weight.stride(1) != 1:
        return False
    return name.startswith("one-") or (is_copied(x) and is_copied(weight))


@lru_cache(maxsize=64)
def product(name: str, device: torch.device, gated: bool) -> Product | None:
    """The candidate of that name; None for one of ours that this device, or this Triton, cannot run."""
    if name in LIBRARY:
        linear: Product = library.linear if name == CUBLAS else library.linear_lt
        return partial(_gated, linear) if gated else linear
    if name.startswith("one-"):
        ours = one_row.linear_silu_mul if gated else one_row.linear
        return partial(ours, sizes=(ONE_GATED_ROW if gated else ONE_ROW)[name])
    if not is_hopper(device):
        return None
    module = "linear_hopper" if name in MANY_ROWS else "linear_rows"
    kernel = hopper_kernel(device, module, "product")
    if kernel is None:
        return None
    if module == "linear_hopper":
        from frame.kernels.linear_hopper import TILES

        return partial(kernel, tile=TILES[MANY_ROWS[name]], gated=gated)
    from frame.kernels.linear_rows import RowsTile

    return partial(kernel, tile=RowsTile(*SOME_ROWS[name]), gated=gated)


def _gated(linear: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return silu_mul(linear(x, weight, bias))
