"""Latent attention of single tokens of up to 16 heads for Hopper, in Gluon; its plain twin: `latent_decode`.

Heads are the columns of a warpgroup's products, and latents (of scores) and their numbers (of sums) the rows, so that
16 heads need a quarter of the matrix unit's time that they need as rows. One warp fetches tiles of 64 latents by bulk
copies; two warpgroups take every second tile each, from a place of its own (`latent_columns`), and join what they found
at the end through that place. Softmax runs in base 2. Knows no layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from . import latent_turns
from .attention import LOG2E
from .chain import await_previous, chained
from .latent_columns import Place, find, leave, store_joined, take
from .latent_copies import Sources, fetch_queries, fetch_tile, sources_of, tile_layout
from .latent_decode import LatentRows, join_parts, latents_of, part_of_row, room_for_parts
from .latent_tiles import (
    RANK,
    Memory,
    Part,
    barriers_of,
    leave_empty,
    serves,
    store_latent,
)
from .linear_invariant import num_multiprocessors

__all__ = ["HEADS", "latent_decode", "serves"]

#: Heads of a program.
HEADS = 16
#: Whether programs serve parts in turn, where there are more parts than multiprocessors, and whether they draw them. No
#: GPU has timed either.
IN_TURN, DRAWS = False, False


class Left(NamedTuple):
    """What the second warpgroup leaves for the first: peaks and totals [2, heads], and a barrier for both and sums."""

    sizes: Any
    there: Any


@gluon.jit
def _fetch(sources, queries, tiles, part, query_row, row_of_block, BLOCK: gl.constexpr):
    """The fetching warp: the queries once, then tile after tile into whatever place is free."""
    fetch_queries(sources, queries, 0, query_row)
    for step in range((part.high - part.low + 63) // 64):
        fetch_tile(sources, tiles, part, step, step, row_of_block, BLOCK)


@gluon.jit
def _sums_left(tiles):
    """The second place for tiles as float32 [512, 16]: nothing is copied there once its last tile was read."""
    return tiles.first._reinterpret(gl.float32, [4, 512, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(2)


@gluon.jit
def _second(
    queries, tiles, weights, left, part, scale, which,
    KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that leaves its sums for the other."""
    mbarrier.wait(queries.ready.index(0), 0)
    found = find(queries, tiles, weights, 0, 0, part.high - part.low, scale, which, KIND, LATENTS, NUMBERS)
    leave(found, _sums_left(tiles), left.sizes)
    mbarrier.arrive(left.there, count=1)


@gluon.jit
def _first(
    queries, tiles, weights, left, part, scale, which, place, real_heads,
    SPLIT: gl.constexpr, KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that joins the sums of both."""
    mbarrier.wait(queries.ready.index(0), 0)
    found = find(queries, tiles, weights, 0, 0, part.high - part.low, scale, which, KIND, LATENTS, NUMBERS)
    mbarrier.wait(left.there, 0)
    store_joined(found, take(_sums_left(tiles), left.sizes, KIND), scale, place, real_heads, SPLIT, KIND)


@gluon.jit(do_not_specialize_on_alignment=["slots"])
def _latent_few(
    out, lse, query, query_turned, lines, lines_turned, latent, cache, slots, rows, scale, heads, row_of_block,
    stride_latent,
    BLOCK: gl.constexpr, SPLIT: gl.constexpr, LINE: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """One program: 16 heads of a row, one part of its tokens; all of them unless SPLIT."""
    await_previous(CHAINED, LONG=True)
    split, group, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits = gl.num_programs(0)
    seq_len = gl.load(rows.seq_lens + row)
    low, high = part_of_row(seq_len, split, splits, 64)
    first_head = row.to(gl.int64) * heads + group * 16
    real_heads = gl.minimum(heads - group * 16, 16)
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    KIND: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    if low >= high:
        leave_empty(out, lse, first_head, real_heads, split, splits, SPLIT, LINE)
    else:
        if high == seq_len:  # this part reads the newest token, so it stores it first
            slot = gl.load(slots + row)
            if slot >= 0:
                place = (slot // BLOCK * row_of_block + slot % BLOCK) * 576
                store_latent(cache, latent + row.to(gl.int64) * stride_latent, place, place + 512, LINE)
        dtype: gl.constexpr = cache.dtype.element_ty
        CHUNKS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
        queries = Memory(
            gl.allocate_shared_memory(dtype, [1, 8, 16, 64], CHUNKS),
            gl.allocate_shared_memory(dtype, [1, 16, 64], LINES), barriers_of([1, 1]), barriers_of([1, 1]),
        )  # fmt: skip
        tiles = Memory(
            gl.allocate_shared_memory(dtype, [16, 8, 8, 64], CHUNKS),
            gl.allocate_shared_memory(dtype, [8, 16, 64], LINES), barriers_of([2, 1]), barriers_of([2, 1]),
        )  # fmt: skip
        weights = gl.allocate_shared_memory(dtype, [2, 16, 64], LINES)
        left = Left(
            gl.allocate_shared_memory(gl.float32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0])), barriers_of([1])
        )
        mbarrier.init(queries.ready.index(0), count=1)
        mbarrier.init(left.there, count=1)
        for stage in gl.static_range(2):
            mbarrier.init(tiles.ready.index(stage), count=1)
            mbarrier.init(tiles.free.index(stage), count=1)
        fence_async_shared()
        table = rows.block_table + gl.load(rows.table_rows + row).to(gl.int64) * rows.stride_table
        part = Part(low, high, table)
        place = Place(
            out + (first_head * splits + split) * 512, lse + first_head * splits + split, splits * 512, splits
        )
        # as values and not as constants, so that what both warpgroups do is traced once
        first, second = gl.to_tensor(0), gl.to_tensor(1)
        gl.warp_specialize([
            (_first, (
                queries, tiles, weights, left, part, scale, first, place, real_heads, SPLIT, KIND, LATENTS, NUMBERS,
            )),
            (_second, (queries, tiles, weights, left, part, scale, second, KIND, LATENTS, NUMBERS)),
            (_fetch, (
                Sources(query, query_turned, lines, lines_turned), queries, tiles, part, first_head.to(gl.int32),
                row_of_block, BLOCK,
            )),
        ], [4, 1], [192, 112])  # fmt: skip


def latent_decode(
    query: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    table_rows: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    splits: int,
    in_turn: bool | None = None,
    draws: bool = DRAWS,
) -> Tensor:
    """As `latent_decode.latent_decode`, of what `serves` is true of; a row is read in up to `splits` parts.

    `in_turn` parts are served by one program a multiprocessor, which `draws` them as `latent_turns.launch` says; None:
    as the number of parts and `IN_TURN` say. Neither changes a bit.
    """
    count, heads, width = query.shape
    out = torch.empty((count, heads, RANK), dtype=query.dtype, device=query.device)
    if count == 0:
        return out
    parts, lse = room_for_parts(out, splits)
    rows = LatentRows(seq_lens, table_rows, block_table, block_table.stride(0))
    groups = triton.cdiv(heads, HEADS)
    if in_turn is None:
        in_turn = IN_TURN and splits * groups * count > num_multiprocessors(query.device)
    if in_turn:
        latent_turns.launch(
            parts, lse, query, latent, kv_cache, slots, rows, scale=scale, splits=splits, draws=draws
        )  # fmt: skip
    else:
        block_size, row_of_block = kv_cache.shape[1], kv_cache.stride(0) // width
        _latent_few[(splits, groups, count)](
            parts, lse, *sources_of(query, kv_cache), latent, kv_cache, slots, rows, scale * LOG2E.value, heads,
            row_of_block, latent.stride(0), BLOCK=block_size, SPLIT=splits > 1,
            LINE=gl.BlockedLayout([4], [32], [4], [0]), LATENTS=tile_layout(0), NUMBERS=tile_layout(1), num_warps=4,
            **chained(query.device),
        )  # fmt: skip
    if splits > 1:
        join_parts(out, parts, lse, latents_of(kv_cache[..., :RANK], kv_cache[..., RANK:]))
    return out
