"""Latent attention of single tokens of up to 16 heads for Hopper, in Gluon; its plain twin: `latent_decode`.

Heads are the columns of a warpgroup's products, and latents (of scores) and their numbers (of sums) the rows, so that
16 heads need a quarter of the matrix unit's time that they need as rows. One warp fetches tiles of 64 latents by bulk
copies; two warpgroups take every second tile each, from a place of its own, and join what they found at the end through
that place. Softmax runs in base 2. Knows no layer.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .attention import LOG2E
from .barriers import barrier
from .chain import await_previous, chained
from .latent_copies import Sources, Views, clear_tail, fetch, sources_of, tile_layout
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

__all__ = ["HEADS", "latent_decode", "serves"]

#: Heads of a program.
HEADS = 16


class Left(NamedTuple):
    """What the second warpgroup leaves for the first: peaks and totals [2, heads], and a barrier for both and sums."""

    sizes: Any
    there: Any


class Place(NamedTuple):
    """Where a program's sums of weight 1 and their log-sum-exp go, with strides from head to head."""

    out: Any
    lse: Any
    stride_head: Any
    stride_lse: Any


@gluon.jit
def _tile(
    acc, peak, total, step, valid, query, query_turned, views, weights, tiles, scale,
    MASKED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One tile: updates (acc [512, 16], peak [16], total [64, 16]). If MASKED, its first `valid` latents are read."""
    stage = step % 2
    mbarrier.wait(tiles.ready.index(stage), (step // 2) & 1)
    empty = gl.zeros([64, 16], gl.float32, KIND)
    scores = warpgroup_mma(views.latents.index(stage), query, empty, use_acc=False, is_async=True)
    scores = warpgroup_mma(views.turned.index(stage), query_turned, scores, is_async=True)
    score = warpgroup_mma_wait(0, deps=[scores])
    if MASKED:
        position = gl.arange(0, 64, gl.SliceLayout(1, KIND))
        score = gl.where((position < valid)[:, None], score, float("-inf"))
        clear_tail(views.groups, stage * 8, valid)
    new_peak = gl.maximum(peak, gl.max(score, 0))
    base = new_peak * scale
    weight = gl.exp2(score * scale - base[None, :])
    shrink = gl.exp2(peak * scale - base)
    total = total * shrink[None, :] + weight
    acc = acc * shrink[None, :]
    weights.store(weight.to(tiles.first.dtype))
    fence_async_shared()
    barrier()
    sums = warpgroup_mma(views.numbers.index(stage), weights, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(tiles.free.index(stage), count=1)
    return acc, new_peak, total


@gluon.jit
def _sums(
    queries, tiles, weights, part, scale, which, KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr
):
    """One warpgroup: (sums [512, 16], their peaks [16] and totals [16]) of every second tile, from `which` on."""
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = tiles.first.dtype
    query = queries.first._reinterpret(dtype, [16, 512], LINES).permute((1, 0))
    query_turned = queries.turned.permute((1, 0))
    views = Views(
        tiles.first._reinterpret(dtype, [2, 64, 512], LATENTS),
        tiles.first._reinterpret(dtype, [2, 512, 64], NUMBERS),
        tiles.first._reinterpret(dtype, [16, 64, 64], LINES),
        tiles.turned._reinterpret(dtype, [2, 64, 64], LINES),
    )
    own = weights.index(which).permute((1, 0))
    peak = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, KIND))
    total = gl.zeros([64, 16], gl.float32, KIND)
    acc = gl.zeros([512, 16], gl.float32, KIND)
    mbarrier.wait(queries.ready, 0)
    whole = (part.high - part.low) // 64
    for step in range(which, whole, 2):
        acc, peak, total = _tile(
            acc, peak, total, step, 64, query, query_turned, views, own, tiles, scale, False, KIND
        )  # fmt: skip
    rest = part.high - part.low - whole * 64
    if (rest > 0) & (whole % 2 == which):
        acc, peak, total = _tile(
            acc, peak, total, whole, rest, query, query_turned, views, own, tiles, scale, True, KIND
        )  # fmt: skip
    return acc, peak, gl.sum(total, 0)


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
    acc, peak, total = _sums(queries, tiles, weights, part, scale, which, KIND, LATENTS, NUMBERS)
    left.sizes.index(0).store(peak)
    left.sizes.index(1).store(total)
    _sums_left(tiles).store(acc)
    barrier()
    mbarrier.arrive(left.there, count=1)


@gluon.jit
def _first(
    queries, tiles, weights, left, part, scale, which, place, real_heads,
    SPLIT: gl.constexpr, KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that joins the sums of both."""
    acc, peak, total = _sums(queries, tiles, weights, part, scale, which, KIND, LATENTS, NUMBERS)
    mbarrier.wait(left.there, 0)
    other_peak = left.sizes.index(0).load(gl.SliceLayout(0, KIND))
    new_peak = gl.maximum(peak, other_peak)
    shrink, other_shrink = gl.exp2((peak - new_peak) * scale), gl.exp2((other_peak - new_peak) * scale)
    total = total * shrink + left.sizes.index(1).load(gl.SliceLayout(0, KIND)) * other_shrink
    other = _sums_left(tiles).load(KIND)
    acc = acc * (shrink / total)[None, :] + other * (other_shrink / total)[None, :]
    head = gl.arange(0, 16, gl.SliceLayout(0, KIND))
    column = gl.arange(0, 512, gl.SliceLayout(1, KIND))
    at = place.out + (head * place.stride_head)[None, :] + column[:, None]
    gl.store(at, acc.to(place.out.dtype.element_ty), mask=(head < real_heads)[None, :])
    if SPLIT:
        gl.store(place.lse + head * place.stride_lse, new_peak * scale + gl.log2(total), mask=head < real_heads)


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
            gl.allocate_shared_memory(dtype, [8, 16, 64], CHUNKS), gl.allocate_shared_memory(dtype, [16, 64], LINES),
            barriers_of([1]), barriers_of([1]),
        )  # fmt: skip
        tiles = Memory(
            gl.allocate_shared_memory(dtype, [16, 8, 8, 64], CHUNKS),
            gl.allocate_shared_memory(dtype, [8, 16, 64], LINES), barriers_of([2, 1]), barriers_of([2, 1]),
        )  # fmt: skip
        weights = gl.allocate_shared_memory(dtype, [2, 16, 64], LINES)
        left = Left(
            gl.allocate_shared_memory(gl.float32, [2, 16], gl.SwizzledSharedLayout(1, 1, 1, [0])), barriers_of([1])
        )
        mbarrier.init(queries.ready, count=1)
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
            (fetch, (
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
) -> Tensor:
    """As `latent_decode.latent_decode`, of what `serves` is true of; a row is read in up to `splits` parts."""
    count, heads, width = query.shape
    out = torch.empty((count, heads, RANK), dtype=query.dtype, device=query.device)
    if count == 0:
        return out
    parts, lse = room_for_parts(out, splits)
    block_size, row_of_block = kv_cache.shape[1], kv_cache.stride(0) // width
    _latent_few[(splits, triton.cdiv(heads, HEADS), count)](
        parts, lse, *sources_of(query, kv_cache), latent, kv_cache, slots,
        LatentRows(seq_lens, table_rows, block_table, block_table.stride(0)), scale * LOG2E.value, heads, row_of_block,
        latent.stride(0), BLOCK=block_size, SPLIT=splits > 1, LINE=gl.BlockedLayout([4], [32], [4], [0]),
        LATENTS=tile_layout(0), NUMBERS=tile_layout(1), num_warps=4, **chained(query.device),
    )  # fmt: skip
    if splits > 1:
        join_parts(out, parts, lse, latents_of(kv_cache[..., :RANK], kv_cache[..., RANK:]))
    return out
