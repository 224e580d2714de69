"""Which kernel multiplies few rows by codes, and with which sizes: the quickest of those that were measured."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from . import coded_fragments, coded_warpgroups
from .coded_fragments import MOST_ROWS, Fragments, bucket
from .coded_warpgroups import Warpgroups

Sizes = Fragments | Warpgroups
#: By whether codes are nibbles and the rows of a program: (outputs, inputs) of products, and the quickest sizes, or
#: None where another kernel is quicker. `benchmarks/kernels/coded_sweep.py` prints it.
MEASURED: dict[tuple[bool, int], dict[tuple[int, int], Sizes | None]] = {}


@lru_cache(maxsize=4096)
def sizes_for(rows: int, outputs: int, depth: int, *, nibbles: bool) -> Sizes | None:
    """Those of the most similar product that was measured; None where another kernel was quicker, or none was."""
    known = MEASURED.get((nibbles, bucket(rows)), {})
    if not known:
        return None

    def far(shape: tuple[int, int]) -> float:
        return abs(math.log(outputs / shape[0])) + abs(math.log(depth / shape[1]))

    return known[min(known, key=far)]


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None,
    sizes: Sizes,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b by the kernel that the sizes are of."""
    if isinstance(sizes, Fragments):
        return coded_fragments.product(x, codes, scales, block, zeros, bias, sizes)
    return coded_warpgroups.product(x, codes, scales, block, zeros, bias, sizes)


def quickest(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """`product` with the sizes that were measured; None where another kernel was quicker, or takes the weight alone."""
    if not 0 < len(x) <= MOST_ROWS or not coded_fragments.fits(codes, scales, block):
        return None
    sizes = sizes_for(len(x), len(codes), x.shape[1], nibbles=codes.dtype == torch.int32)
    return None if sizes is None else product(x, codes, scales, block, zeros, bias, sizes)
