"""Latent attention of single tokens for Hopper, in Gluon; its plain twin, which steps still launch: `latent_decode`.

A program serves 64 heads of a row and one part of its tokens. One warp fetches tiles of 64 latents by bulk copies, each
of them once for scores and sums; two warpgroups attend to them. Each computes all scores and sums half of the columns:
half as many scores again as one would need, but the warpgroups need nothing of each other, so that one multiplies while
the other weighs. Softmax runs in base 2. Knows no layer.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .attention import LOG2E
from .barriers import barrier
from .chain import await_previous, chained
from .latent_decode import LatentRows, join_parts, latents_of, room_for_parts
from .latent_tiles import (
    RANK,
    TILE,
    Memory,
    Part,
    barriers_of,
    leave_empty,
    serves,
    store_latent,
)

__all__ = ["HEADS", "latent_decode", "serves"]

#: Heads of a program.
HEADS = 64


@gluon.jit
def _fetch(
    query_source, source, queries, tiles, part, query_row, row_of_block, BLOCK: gl.constexpr, PAGE: gl.constexpr
):
    """The fetching warp: the queries once, then tile after tile into whatever place is free."""
    PAGES: gl.constexpr = 64 // PAGE
    mbarrier.expect(queries.ready, 64 * 576 * 2)
    for chunk in gl.static_range(8):
        tma.async_copy_global_to_shared(
            query_source, [query_row, chunk * 64], queries.ready, queries.first.index(chunk)
        )  # fmt: skip
    tma.async_copy_global_to_shared(query_source, [query_row, 512], queries.ready, queries.turned.index(0))
    for step in range((part.high - part.low + 63) // 64):
        stage = step % 2
        ready = tiles.ready.index(stage)
        mbarrier.wait(tiles.free.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(ready, 64 * 576 * 2)
        for page in gl.static_range(PAGES):
            position = part.low + step * 64 + page * PAGE
            block = gl.load(part.table + position // BLOCK, mask=position < part.high, other=0)
            # a row outside of the cache is read as zeros
            row = gl.where(position < part.high, block * row_of_block + position % BLOCK, 0x7FFF0000)
            for chunk in gl.static_range(8):
                place = tiles.first.index((stage * 8 + chunk) * PAGES + page)
                tma.async_copy_global_to_shared(source, [row, chunk * 64], ready, place)
            tma.async_copy_global_to_shared(source, [row, 512], ready, tiles.turned.index(stage * PAGES + page))


@gluon.jit
def _clear_tail(chunks, first, valid):
    """Zeros what is behind the first `valid` latents of a tile in four chunks: no weight hides what is no number."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    kept = gl.arange(0, 64, gl.SliceLayout(1, COPY)) < valid
    for chunk in gl.static_range(4):
        part = chunks.index(first + chunk)
        part.store(gl.where(kept[:, None], part.load(COPY), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _tile(
    acc, peak, total, step, valid, query, query_turned, keys, keys_turned, latents, chunks, tiles, scale, half,
    MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """One tile: updates (acc, peak, total). If MASKED, only its first `valid` latents are read."""
    SUMS: gl.constexpr = acc.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    stage = step % 2
    mbarrier.wait(tiles.ready.index(stage), (step // 2) & 1)
    empty = gl.zeros([64, 64], gl.float32, SCORES)
    scores = warpgroup_mma(query, keys.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    scores = warpgroup_mma(query_turned, keys_turned.index(stage).permute((1, 0)), scores, is_async=True)
    score = warpgroup_mma_wait(0, deps=[scores])
    if MASKED:
        position = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        score = gl.where((position < valid)[None, :], score, float("-inf"))
        _clear_tail(chunks, stage * 8 + half * 4, valid)
    new_peak = gl.maximum(peak, gl.max(score, 1))
    base = new_peak * scale
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(peak * scale - base)
    total = total * shrink + gl.sum(weight, 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    weight = gl.convert_layout(weight.to(tiles.first.dtype), OPERAND)
    sums = warpgroup_mma(weight, latents.index(stage * 2 + half), acc, is_async=True)
    acc, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    mbarrier.arrive(tiles.free.index(stage), count=1)
    return acc, new_peak, total


@gluon.jit
def _attend(
    out, lse, queries, tiles, part, scale, first_head, real_heads, stride_head, stride_lse, half,
    SPLIT: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 heads, 256 columns of the sums from 256 · `half` on."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    dtype: gl.constexpr = tiles.first.dtype
    query = queries.first._reinterpret(dtype, [1, 64, 512], KIND).index(0)
    query_turned = queries.turned.index(0)
    keys = tiles.first._reinterpret(dtype, [2, 64, 512], KIND)
    keys_turned = tiles.turned._reinterpret(dtype, [2, 64, 64], KIND)
    latents = tiles.first._reinterpret(dtype, [4, 64, 256], KIND)
    chunks = tiles.first._reinterpret(dtype, [16, 64, 64], KIND)
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    mbarrier.wait(queries.ready, 0)
    whole = (part.high - part.low) // 64
    for step in range(whole):
        acc, peak, total = _tile(
            acc, peak, total, step, 64, query, query_turned, keys, keys_turned, latents, chunks, tiles, scale, half,
            False, SCORES,
        )  # fmt: skip
    rest = part.high - part.low - whole * 64
    if rest > 0:
        acc, peak, total = _tile(
            acc, peak, total, whole, rest, query, query_turned, keys, keys_turned, latents, chunks, tiles, scale, half,
            True, SCORES,
        )  # fmt: skip
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
    lane = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    column = half * 256 + gl.arange(0, 256, gl.SliceLayout(0, SUMS))
    place = out + ((first_head + lane) * stride_head)[:, None] + column[None, :]
    gl.store(place, acc.to(out.dtype.element_ty), mask=(lane < real_heads)[:, None])
    if SPLIT:
        own = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        mask = (own < real_heads) & (half == 0)
        gl.store(lse + (first_head + own) * stride_lse, peak * scale + gl.log2(total), mask=mask)


@gluon.jit(do_not_specialize_on_alignment=["slots"])
def _latent_hopper(
    out, lse, query_source, source, latent, cache, slots, rows, scale, heads, row_of_block, stride_latent,
    BLOCK: gl.constexpr, PAGE: gl.constexpr, SPLIT: gl.constexpr, LINE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """One program: 64 heads of a row, one part of its tokens; all of them unless SPLIT."""
    await_previous(CHAINED, LONG=True)
    split, group, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    splits = gl.num_programs(0)
    seq_len = gl.load(rows.seq_lens + row)
    span = ((seq_len + splits - 1) // splits + 63) // 64 * 64
    low = split * span
    high = gl.minimum(low + span, seq_len)
    first_head = row.to(gl.int64) * heads + group * 64
    real_heads = heads - group * 64
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if low >= high:
        leave_empty(out, lse, first_head, real_heads, split, splits, SPLIT, LINE)
    else:
        if high == seq_len:  # this part reads the newest token, so it stores it first
            slot = gl.load(slots + row)
            if slot >= 0:
                place = (slot // BLOCK * row_of_block + slot % BLOCK) * 576
                store_latent(cache, latent + row.to(gl.int64) * stride_latent, place, place + 512, LINE)
        dtype: gl.constexpr = cache.dtype.element_ty
        PAGES: gl.constexpr = 64 // PAGE
        queries = Memory(
            gl.allocate_shared_memory(dtype, [8, 64, 64], KIND), gl.allocate_shared_memory(dtype, [1, 64, 64], KIND),
            barriers_of([1]), barriers_of([1]),
        )  # fmt: skip
        tiles = Memory(
            gl.allocate_shared_memory(dtype, [16 * PAGES, PAGE, 64], KIND),
            gl.allocate_shared_memory(dtype, [2 * PAGES, PAGE, 64], KIND), barriers_of([2, 1]), barriers_of([2, 1]),
        )  # fmt: skip
        mbarrier.init(queries.ready, count=1)
        for stage in gl.static_range(2):
            mbarrier.init(tiles.ready.index(stage), count=1)
            mbarrier.init(tiles.free.index(stage), count=2)
        fence_async_shared()
        table = rows.block_table + gl.load(rows.table_rows + row).to(gl.int64) * rows.stride_table
        part = Part(low, high, table)
        stride_lse = splits
        # as values and not as constants, so that what both warpgroups do is traced once
        first, second = gl.to_tensor(0), gl.to_tensor(1)
        place = out + split * 512
        numbers = lse + split
        gl.warp_specialize([
            (_attend, (
                place, numbers, queries, tiles, part, scale, first_head, real_heads, splits * 512, stride_lse, first,
                SPLIT, PAGE,
            )),
            (_attend, (
                place, numbers, queries, tiles, part, scale, first_head, real_heads, splits * 512, stride_lse, second,
                SPLIT, PAGE,
            )),
            (_fetch, (
                query_source, source, queries, tiles, part, (first_head).to(gl.int32), row_of_block, BLOCK, PAGE,
            )),
        ], [4, 1], [232, 40])  # fmt: skip


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
    places = (len(kv_cache) - 1) * row_of_block + block_size
    page, kind = min(block_size, TILE), gl.NVMMASharedLayout(128, 16, 2)
    lines = kv_cache.as_strided((places, width), (width, 1))
    given = query.contiguous().view(count * heads, width)
    _latent_hopper[(splits, triton.cdiv(heads, HEADS), count)](
        parts, lse, TensorDescriptor(given, [count * heads, width], [width, 1], [HEADS, 64], kind),
        TensorDescriptor(lines, [places, width], [width, 1], [page, 64], kind), latent, kv_cache, slots,
        LatentRows(seq_lens, table_rows, block_table, block_table.stride(0)), scale * LOG2E.value, heads, row_of_block,
        latent.stride(0), BLOCK=block_size, PAGE=page, SPLIT=splits > 1, LINE=gl.BlockedLayout([4], [32], [4], [0]),
        num_warps=4, **chained(query.device),
    )  # fmt: skip
    if splits > 1:
        join_parts(out, parts, lse, latents_of(kv_cache[..., :RANK], kv_cache[..., RANK:]))
    return out
