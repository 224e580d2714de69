"""What kernels of latent attention for Hopper share, in Gluon: tiles of 64 latents, and the warp that fetches them.

A tile lies in shared memory as 8 chunks of 64 numbers, and the 64 turned ones apart. Knows no products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .barriers import barrier

#: Latents of a tile, and the parts of a latent that there are kernels for.
TILE, RANK, ROPE = 64, 512, 64


class Memory(NamedTuple):
    """Shared memory for queries or tiles, 64 numbers of each apart, and barriers: what is there, and what is free."""

    first: Any
    turned: Any
    ready: Any
    free: Any


class Part(NamedTuple):
    """The tokens from `low` to below `high` of a row, and its blocks."""

    low: Any
    high: Any
    table: Any


@gluon.jit
def fetch(
    query_source, source, queries, tiles, part, query_row, row_of_block, which,
    HEADS: gl.constexpr, WARPS: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """A fetching warp of WARPS, one or two: each brings its tiles into whatever place is free, the first the queries.

    A tile of pages of 16 is 36 copies, and a warp needs some 2,000 cycles to begin them. Two have the registers to read
    where a tile is in the cache while no place is free yet.
    """
    PAGES: gl.constexpr = 64 // PAGE
    if which == 0:
        mbarrier.expect(queries.ready, HEADS * 576 * 2)
        for chunk in gl.static_range(8):
            tma.async_copy_global_to_shared(
                query_source, [query_row, chunk * 64], queries.ready, queries.first.index(chunk)
            )  # fmt: skip
        tma.async_copy_global_to_shared(query_source, [query_row, 512], queries.ready, queries.turned.index(0))
    for step in range(which, (part.high - part.low + 63) // 64, WARPS):
        stage = step % 2
        ready = tiles.ready.index(stage)
        first = part.low + step * 64
        if WARPS > 1:
            rows = _rows_of(part, first, row_of_block, BLOCK, PAGE)
        mbarrier.wait(tiles.free.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(ready, 64 * 576 * 2)
        for page in gl.static_range(PAGES):
            row = rows[page] if WARPS > 1 else _row_of(part, first + page * PAGE, row_of_block, BLOCK)
            for chunk in gl.static_range(8):
                place = tiles.first.index((stage * 8 + chunk) * PAGES + page)
                tma.async_copy_global_to_shared(source, [row, chunk * 64], ready, place)
            tma.async_copy_global_to_shared(source, [row, 512], ready, tiles.turned.index(stage * PAGES + page))


@gluon.jit
def _rows_of(part, position, row_of_block, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """Where four pages from a token on are in the cache, the first or two of which a tile of longer pages needs."""
    return (
        _row_of(part, position, row_of_block, BLOCK), _row_of(part, position + PAGE, row_of_block, BLOCK),
        _row_of(part, position + 2 * PAGE, row_of_block, BLOCK),
        _row_of(part, position + 3 * PAGE, row_of_block, BLOCK),
    )  # fmt: skip


@gluon.jit
def _row_of(part, position, row_of_block, BLOCK: gl.constexpr):
    block = gl.load(part.table + position // BLOCK, mask=position < part.high, other=0)
    # a row outside of the cache is read as zeros
    return gl.where(position < part.high, block * row_of_block + position % BLOCK, 0x7FFF0000)


@gluon.jit
def clear_tail(chunks, first, valid, CHUNKS: gl.constexpr):
    """Zeros what is behind the first `valid` latents of a tile in CHUNKS chunks: no weight hides what is no number."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    kept = gl.arange(0, 64, gl.SliceLayout(1, COPY)) < valid
    for chunk in gl.static_range(CHUNKS):
        part = chunks.index(first + chunk)
        part.store(gl.where(kept[:, None], part.load(COPY), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def store_latent(cache, latent, place, turned_place, LINE: gl.constexpr):
    """Stores a new latent, so that copies that begin behind it find it."""
    wide = gl.arange(0, 512, LINE)
    gl.store(cache + place + wide, gl.load(latent + wide))
    narrow = gl.arange(0, 64, LINE)
    gl.store(cache + turned_place + narrow, gl.load(latent + 512 + narrow))
    # copies read memory another way than stores write it
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [wide], dtype=gl.int32, is_pure=False, pack=1
    )
    barrier()


@gluon.jit
def leave_empty(out, lse, first_head, real_heads, split, splits, SPLIT: gl.constexpr, LINE: gl.constexpr):
    """What a program without tokens leaves: sums of no weight, or zeros."""
    lane = gl.arange(0, 64, LINE)
    if SPLIT:
        empty = gl.full([64], float("-inf"), gl.float32, LINE)
        gl.store(lse + (first_head + lane) * splits + split, empty, mask=lane < real_heads)
    else:
        wide = gl.arange(0, 512, LINE)
        for head in range(gl.minimum(real_heads, 64)):
            gl.store(out + (first_head + head) * 512 + wide, gl.zeros([512], out.dtype.element_ty, LINE))


@gluon.jit
def barriers_of(shape: gl.constexpr):
    """Barriers in shared memory, of whatever shape."""
    return gl.allocate_shared_memory(gl.int64, shape, mbarrier.MBarrierLayout())


def sources_of(query: Tensor, kv_cache: Tensor, heads: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """What is copied from: `query` [N, H, 576] by 64 numbers of `heads` heads, and the cache by those of a page."""
    width, block_size, row_of_block = query.shape[2], kv_cache.shape[1], kv_cache.stride(0) // query.shape[2]
    places, count = (len(kv_cache) - 1) * row_of_block + block_size, query.shape[0] * query.shape[1]
    kind = gl.NVMMASharedLayout(128, 16, 2)
    lines, given = kv_cache.as_strided((places, width), (width, 1)), query.contiguous().view(count, width)
    return (
        TensorDescriptor(given, [count, width], [width, 1], [heads, 64], kind),
        TensorDescriptor(lines, [places, width], [width, 1], [min(block_size, TILE), 64], kind),
    )


def serves(query: Tensor, kv_cache: Tensor, rank: int) -> bool:
    """Whether there is a kernel for such queries [N, H, rank + rope] and such a cache, on a Hopper GPU."""
    whole = kv_cache.stride(2) == 1 and kv_cache.stride(1) == RANK + ROPE and kv_cache.stride(0) % (RANK + ROPE) == 0
    return (
        whole
        and rank == RANK
        and query.shape[2] == RANK + ROPE
        and query.dtype == kv_cache.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.shape[1] in (16, 32, 64, 128, 256)
        and kv_cache.data_ptr() % 16 == 0
    )
