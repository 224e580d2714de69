"""Which kernel multiplies few rows by codes, and with which sizes: the quickest of those that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from . import coded_fragments, coded_ring, coded_warpgroups
from .coded_fragments import MOST_ROWS, Fragments, bucket
from .coded_ring import Ring
from .coded_warpgroups import Warpgroups

Sizes = Fragments | Warpgroups | Ring
S = TypeVar("S")
#: As `MEASURED`, of one row that comes alone with 8-bit floats. `benchmarks/kernels/ring_sweep.py` printed it.
ONE_ROW: dict[tuple[int, int], Ring | None] = {
    (6144, 4096): Ring(2, 3),
    (4096, 4096): Ring(3, 2),
    (28672, 4096): Ring(4, 2),
    (4096, 14336): Ring(5, 2),
    (3072, 4096): Ring(5, 2),
    (4096, 2048): None,
    (14336, 4096): Ring(4, 2),
    (4096, 7168): Ring(4, 2),
    (4096, 1024): None,
    (1024, 2048): Ring(8, 1),
    (6144, 1024): Ring(3, 3),
    (1024, 3072): Ring(8, 1),
    (7168, 5120): Ring(4, 2),
    (5120, 5120): Ring(3, 3),
    (34816, 5120): Ring(5, 2),
    (5120, 17408): Ring(2, 4),
}
#: By whether codes are nibbles and the rows of a program: (outputs, inputs) of products, and the quickest sizes, or
#: None where another kernel is quicker. `benchmarks/kernels/coded_sweep.py` printed it, on an H200.
MEASURED: dict[tuple[bool, int], dict[tuple[int, int], Sizes | None]] = {
    (True, 8): {
        (6144, 4096): Fragments(1, 1, 8, 2, 0),
        (4096, 4096): Fragments(1, 1, 8, 4, 0),
        (28672, 4096): Fragments(1, 1, 4, 2, 0),
        (4096, 14336): Fragments(1, 1, 8, 4, 0),
        (1000, 2816): Fragments(1, 1, 8, 4, 0),
        (3352, 5504): Fragments(1, 2, 8, 2, 0),
    },
    (True, 16): {
        (6144, 4096): Warpgroups(8, 8, 1, 4, 0),
        (4096, 4096): Warpgroups(4, 8, 2, 4, 0),
        (28672, 4096): Warpgroups(4, 1, 2, 4, 0),
        (4096, 14336): Warpgroups(8, 8, 2, 4, 0),
        (1000, 2816): Warpgroups(4, 8, 2, 4, 0),
        (3352, 5504): Warpgroups(8, 8, 2, 4, 0),
    },
    (True, 64): {
        (6144, 4096): Warpgroups(8, 4, 2, 2, 128),
        (4096, 4096): Warpgroups(8, 4, 2, 4, 0),
        (28672, 4096): Warpgroups(8, 1, 2, 2, 128),
        (4096, 14336): Warpgroups(8, 4, 2, 4, 0),
        (1000, 2816): Warpgroups(4, 8, 4, 2, 0),
        (3352, 5504): Warpgroups(8, 4, 2, 4, 0),
    },
    (False, 8): {
        (6144, 4096): Fragments(1, 1, 8, 4, 0),
        (4096, 4096): None,
        (28672, 4096): Fragments(1, 1, 2, 4, 0),
        (4096, 14336): None,
        (1000, 2816): None,
        (3352, 5504): None,
    },
    (False, 16): {
        (6144, 4096): Warpgroups(8, 8, 2, 4, 0),
        (4096, 4096): Warpgroups(8, 8, 1, 4, 0),
        (28672, 4096): Fragments(1, 4, 2, 2, 0),
        (4096, 14336): Fragments(1, 1, 16, 1, 0),
        (1000, 2816): Warpgroups(4, 8, 2, 4, 0),
        (3352, 5504): Warpgroups(8, 8, 1, 4, 0),
    },
    (False, 64): {
        (6144, 4096): None,
        (4096, 4096): None,
        (28672, 4096): None,
        (4096, 14336): None,
        (1000, 2816): None,
        (3352, 5504): None,
    },
    (True, 32): {
        (6144, 4096): Warpgroups(8, 4, 4, 2, 0),
        (4096, 4096): Warpgroups(8, 4, 2, 4, 0),
        (28672, 4096): Warpgroups(8, 1, 1, 4, 0),
        (4096, 14336): Warpgroups(8, 8, 1, 4, 0),
        (1000, 2816): Warpgroups(8, 8, 2, 4, 0),
        (3352, 5504): Warpgroups(8, 8, 4, 2, 0),
    },
    (False, 32): {
        (6144, 4096): None,
        (4096, 4096): None,
        (28672, 4096): None,
        (4096, 14336): None,
        (1000, 2816): Warpgroups(4, 4, 1, 4, 0),
        (3352, 5504): None,
    },
}


@lru_cache(maxsize=4096)
def sizes_for(rows: int, outputs: int, depth: int, *, nibbles: bool) -> Sizes | None:
    """Those of the most similar product that was measured; None where another kernel was quicker, or none was."""
    return _nearest(MEASURED.get((nibbles, bucket(rows)), {}), outputs, depth)


@lru_cache(maxsize=4096)
def ring_for(outputs: int, depth: int) -> Ring | None:
    """As `sizes_for`, of one row of 8-bit floats by the ring of copies."""
    return _nearest(ONE_ROW, outputs, depth)


def _nearest(known: Mapping[tuple[int, int], S], outputs: int, depth: int) -> S | None:
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
    if isinstance(sizes, Ring):
        return coded_ring.product(x, codes, scales, bias, sizes)
    if isinstance(sizes, Fragments):
        return coded_fragments.product(x, codes, scales, block, zeros, bias, sizes)
    return coded_warpgroups.product(x, codes, scales, block, zeros, bias, sizes)


def quickest(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """`product` with the sizes that were measured; None where another kernel was quicker, or takes the weight alone."""
    if not 0 < len(x) <= MOST_ROWS or not coded_fragments.fits(codes, scales, block):
        return None
    nibbles = codes.dtype == torch.int32
    if len(x) == 1 and coded_ring.fits(codes, scales, block, zeros):
        ring = ring_for(len(codes), x.shape[1])
        if ring is not None:
            return product(x, codes, scales, block, zeros, bias, ring)
    sizes = sizes_for(len(x), len(codes), x.shape[1], nibbles=nibbles)
    return None if sizes is None else product(x, codes, scales, block, zeros, bias, sizes)
