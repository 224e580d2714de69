"""Tiles of 64 latents in shared memory for the Hopper kernel of few heads: copies that bring them, and views of them.

A bulk copy brings 512 numbers of 8 latents, as 8 chunks of 64 one behind the other. Products read 64 latents of 8 such
copies where they lie (`tile_layout`), so that a tile of pages of 16 takes 12 copies and not 36. Knows no products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import SharedLinearLayout
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .barriers import barrier


def tile_layout(token: int) -> SharedLinearLayout:
    """A tile in shared memory whose dimension `token` counts its latents, and the other one their 512 numbers."""
    places = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32)]  # (latent, number) for each bit of an address
    places += [(1, 8), (2, 16), (4, 32)]  # eight latents of 128 bytes: copies mix 16 bytes by the latent's number
    places += [(0, 64), (0, 128), (0, 256), (8, 0), (16, 0), (32, 0)]
    return SharedLinearLayout([list(place if token == 0 else place[::-1]) for place in places], [], 1024)


class Sources(NamedTuple):
    """What bulk copies read, of queries and of the cache: chunks of 64 numbers [8, rows, 64], and turned ones."""

    query: Any
    query_turned: Any
    cache: Any
    cache_turned: Any


class Views(NamedTuple):
    """Two places for tiles as products read them: [latents, numbers], [numbers, latents], 8 latents each, turned."""

    latents: Any
    numbers: Any
    groups: Any
    turned: Any


@gluon.jit
def _row_of(part, position, row_of_block, BLOCK: gl.constexpr):
    """The row of the cache that holds a token: one outside of it, which is read as zeros, for what is not in `part`."""
    block = gl.load(part.table + position // BLOCK, mask=position < part.high, other=0)
    return gl.where(position < part.high, block * row_of_block + position % BLOCK, 0x7FFF0000)


@gluon.jit
def fetch(sources, queries, tiles, part, query_row, row_of_block, BLOCK: gl.constexpr):
    """The fetching warp: the queries once, then tile after tile into whatever place is free."""
    mbarrier.expect(queries.ready, 16 * 576 * 2)
    tma.async_copy_global_to_shared(sources.query, [0, query_row, 0], queries.ready, queries.first)
    tma.async_copy_global_to_shared(sources.query_turned, [query_row, 512], queries.ready, queries.turned)
    for step in range((part.high - part.low + 63) // 64):
        stage = step % 2
        ready = tiles.ready.index(stage)
        first = part.low + step * 64
        rows = (  # read while the place is not free yet
            _row_of(part, first, row_of_block, BLOCK), _row_of(part, first + 16, row_of_block, BLOCK),
            _row_of(part, first + 32, row_of_block, BLOCK), _row_of(part, first + 48, row_of_block, BLOCK),
        )  # fmt: skip
        mbarrier.wait(tiles.free.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(ready, 64 * 576 * 2)
        for page in gl.static_range(4):
            row, place = rows[page], stage * 8 + page * 2
            tma.async_copy_global_to_shared(sources.cache, [0, row, 0], ready, tiles.first.index(place))
            tma.async_copy_global_to_shared(sources.cache, [0, row + 8, 0], ready, tiles.first.index(place + 1))
            tma.async_copy_global_to_shared(
                sources.cache_turned, [row, 512], ready, tiles.turned.index(stage * 4 + page)
            )  # fmt: skip


@gluon.jit
def clear_tail(groups, first, valid):
    """Zeros what is behind the first `valid` latents of a tile: no weight hides what is no number."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, 64, gl.SliceLayout(1, COPY))  # of eight chunks of a group of eight latents
    for group in range(valid // 8, 8):
        part = groups.index(first + group)
        part.store(gl.where((group * 8 + line % 8 < valid)[:, None], part.load(COPY), 0.0))
    fence_async_shared()
    barrier()


def sources_of(query: Tensor, kv_cache: Tensor) -> Sources:
    """What copies read of queries [N, H, 576] and a cache [blocks, block_size, 576]; see `latent_tiles.serves`."""
    width, row_of_block = query.shape[2], kv_cache.stride(0) // query.shape[2]
    places, count = (len(kv_cache) - 1) * row_of_block + kv_cache.shape[1], query.shape[0] * query.shape[1]
    lines, given = kv_cache.as_strided((places, width), (width, 1)), query.contiguous().view(count, width)
    chunks, plain = gl.NVMMASharedLayout(128, 16, 3), gl.NVMMASharedLayout(128, 16, 2)
    return Sources(
        TensorDescriptor(given, [8, count, 64], [64, width, 1], [8, 16, 64], chunks),
        TensorDescriptor(given, [count, width], [width, 1], [16, 64], plain),
        TensorDescriptor(lines, [8, places, 64], [64, width, 1], [8, 8, 64], chunks),
        TensorDescriptor(lines, [places, width], [width, 1], [16, 64], plain),
    )
