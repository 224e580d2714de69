"""How many splits decodes read keys in and how long they are, in Triton: of shared prefixes and of a row's own keys."""

from __future__ import annotations

import triton
import triton.language as tl

#: Tokens of a shared prefix are attended apart in multiples of this: a multiple of every tile of keys.
PREFIX_ALIGN = tl.constexpr(64)


#: Most tiles of rows that are counted.
_TILES = tl.constexpr(128)


@triton.jit
def prefix_splits(tile_lens, num_tiles, programs, most):
    """The splits of a shared prefix: more where few tiles are in use, so that about `programs` programs run in all.

    Computed on the device, since a CUDA graph is replayed for any number of used tiles.
    """
    tile = tl.arange(0, _TILES)
    used = tl.sum((tl.load(tile_lens + tile, tile < num_tiles, other=0) > 0).to(tl.int32), 0)
    return tl.maximum(tl.minimum(programs // tl.maximum(used, 1), most), 1)


@triton.jit
def prefix_span(length, splits):
    """Tokens of each part of a shared prefix: about even, in whole tiles, none shorter than four."""
    span = tl.maximum(tl.cdiv(length, splits), 4 * PREFIX_ALIGN)
    return tl.cdiv(span, PREFIX_ALIGN) * PREFIX_ALIGN


@triton.jit
def own_span(length, splits, min_span, BLOCK_N: tl.constexpr):
    """Keys of each of at most `splits` parts of a row: even, in whole tiles, as `DecodeLaunch.min_span` has it."""
    # Measured: more than 16 splits of less than 128 keys cost more to join than they save.
    shortest = tl.minimum(tl.cdiv(length, 16), 128)
    if min_span > 0:
        shortest = tl.cdiv(length, tl.maximum(length // min_span, 1))
    return tl.cdiv(tl.maximum(tl.cdiv(length, splits), shortest), BLOCK_N) * BLOCK_N
