"""Causal attention of prompts over the paged cache, for Hopper, in Gluon; the plain twin: `attention.paged_attention`.

Two warpgroups of 64 queries each share the tiles of keys and values that a third one fetches: by bulk copies, one for
each page and 64 features, straight from the paged cache. Each warpgroup overlaps the softmax of one tile with the
products of its neighbours, as FlashAttention-3 does (Shah et al. 2024). Tiles go from the diagonal back to the first
key, so that only the first ones need a mask. Knows no request and no layer.
"""

from __future__ import annotations

import torch
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

#: Queries of a program, and of each of its two warpgroups.
BLOCK_M = 128
HALF_M = 64
#: Keys of a tile, and tiles in flight.
BLOCK_N = 128
STAGES = 2
#: Features of one bulk copy: 128 bytes, the widest swizzle.
CHUNK = 64

_LOG2E = 1.4426950408889634


@gluon.jit
def _cache_row(table, position, seq_len, row_of_block, BLOCK_SIZE: gl.constexpr):
    """Where the page at `position` begins; behind the end, a row outside of the cache, which is read as zeros."""
    there = position < seq_len
    block = gl.load(table + position // BLOCK_SIZE, mask=there, other=0)
    return gl.where(there, block * row_of_block + position % BLOCK_SIZE, 0x7FFF0000)


@gluon.jit
def _fetch(
    keys, values, query, query_smem, key_smem, value_smem, query_ready, key_ready, key_free, value_ready, value_free,
    table, row_of_block, query_row, query_feature, feature, num_tiles, seq_len,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the queries once, then keys and values tile by tile, from the last one to the first."""
    PAGES: gl.constexpr = TILE // PAGE
    CHUNKS: gl.constexpr = DIM // 64
    mbarrier.expect(query_ready, 2 * 64 * DIM * 2)
    for half in gl.static_range(2):
        for chunk in gl.static_range(CHUNKS):
            tma.async_copy_global_to_shared(
                query, [query_row + half * 64, query_feature + chunk * 64], query_ready,
                query_smem.index(half * CHUNKS + chunk),
            )  # fmt: skip
    for step in range(num_tiles):
        tile = num_tiles - 1 - step
        stage = step % NUM_STAGES
        free = ((step // NUM_STAGES) & 1) ^ 1
        mbarrier.wait(key_free.index(stage), free)
        mbarrier.expect(key_ready.index(stage), TILE * DIM * 2)
        for page in gl.static_range(PAGES):
            row = _cache_row(table, tile * TILE + page * PAGE, seq_len, row_of_block, BLOCK_SIZE)
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    keys, [row, feature + chunk * 64], key_ready.index(stage),
                    key_smem.index((stage * CHUNKS + chunk) * PAGES + page),
                )  # fmt: skip
        mbarrier.wait(value_free.index(stage), free)
        mbarrier.expect(value_ready.index(stage), TILE * DIM * 2)
        for page in gl.static_range(PAGES):
            row = _cache_row(table, tile * TILE + page * PAGE, seq_len, row_of_block, BLOCK_SIZE)
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    values, [row, feature + chunk * 64], value_ready.index(stage),
                    value_smem.index((stage * CHUNKS + chunk) * PAGES + page),
                )  # fmt: skip


@gluon.jit
def _clear_tail(values, valid, PAGE: gl.constexpr, CHUNKS: gl.constexpr, PAGES: gl.constexpr):
    """Zeros the values behind the first `valid` keys of a tile, within the page where those end.

    What ended requests left there may not be finite, and no weight hides that. Both warpgroups may do it at once.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    page = (valid - 1) // PAGE
    kept = gl.arange(0, PAGE, gl.SliceLayout(1, COPY)) < valid - page * PAGE
    for chunk in gl.static_range(CHUNKS):
        part = values.index(chunk * PAGES + page)
        part.store(gl.where(kept[:, None], part.load(COPY), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weigh(score, peak, total, position, query_pos, scale, MASKED: gl.constexpr):
    """Softmax of one tile against what came before: (weights, new peak, new total, factor for what came before)."""
    if MASKED:
        score = gl.where(position[None, :] <= query_pos[:, None], score, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(score, 1))
    base = new_peak * scale
    if MASKED:
        base = gl.where(new_peak == float("-inf"), 0.0, base)
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(peak * scale - base)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _advance(
    step, acc, weight, peak, total, query, key_smem, value_smem, key_ready, key_free, value_ready, value_free,
    query_pos, num_tiles, scale,
    MASKED: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, SCORES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Scores of tile `step` while the values of the tile before are added; then the softmax of its scores."""
    stage = step % NUM_STAGES
    before = (step - 1) % NUM_STAGES
    mbarrier.wait(key_ready.index(stage), (step // NUM_STAGES) & 1)
    empty = gl.zeros([64, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(query, key_smem.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    mbarrier.wait(value_ready.index(before), ((step - 1) // NUM_STAGES) & 1)
    sums = warpgroup_mma(weight, value_smem.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_free.index(stage), count=1)
    position = (num_tiles - 1 - step) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    new, peak, total, shrink = _weigh(score, peak, total, position, query_pos, scale, MASKED)
    acc, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(new.to(query.dtype), OPERAND), peak, total


@gluon.jit
def _attend(
    out, query_smem, key_smem, value_smem, query_ready, key_ready, key_free, value_ready, value_free,
    first_token, first_pos, query_len, seq_len, out_row, stride_out, num_tiles, num_masked, scale,
    HALF: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries over all tiles."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_pos = first_pos + lane
    queries = query_smem._reinterpret(query_smem.dtype, [2, 64, DIM], KIND).index(HALF)
    key_tiles = key_smem._reinterpret(key_smem.dtype, [NUM_STAGES, TILE, DIM], KIND)
    value_tiles = value_smem._reinterpret(value_smem.dtype, [NUM_STAGES, TILE, DIM], KIND)
    mbarrier.wait(query_ready, 0)
    mbarrier.wait(key_ready.index(0), 0)
    empty = gl.zeros([64, TILE], gl.float32, SCORES)
    scores = warpgroup_mma(queries, key_tiles.index(0).permute((1, 0)), empty, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(key_free.index(0), count=1)
    position = (num_tiles - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    new, peak, total, _ = _weigh(score, peak, total, position, query_pos, scale, True)
    weight = gl.convert_layout(new.to(queries.dtype), OPERAND)
    acc = gl.zeros([64, DIM], gl.float32, SUMS)
    valid = seq_len - (num_tiles - 1) * TILE
    mbarrier.wait(value_ready.index(0), 0)
    if valid % PAGE != 0 and valid < TILE:
        _clear_tail(value_smem, valid, PAGE, DIM // 64, TILE // PAGE)
    for step in range(1, num_masked):
        acc, weight, peak, total = _advance(
            step, acc, weight, peak, total, queries, key_tiles, value_tiles, key_ready, key_free, value_ready,
            value_free, query_pos, num_tiles, scale, True, TILE, NUM_STAGES, SCORES, OPERAND,
        )  # fmt: skip
    for step in range(gl.maximum(num_masked, 1), num_tiles):
        acc, weight, peak, total = _advance(
            step, acc, weight, peak, total, queries, key_tiles, value_tiles, key_ready, key_free, value_ready,
            value_free, query_pos, num_tiles, scale, False, TILE, NUM_STAGES, SCORES, OPERAND,
        )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(value_ready.index(last % NUM_STAGES), (last // NUM_STAGES) & 1)
    sums = warpgroup_mma(weight, value_tiles.index(last % NUM_STAGES), acc, is_async=True)
    acc, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, SUMS))[:, None]
    token = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    place = (out_row + token).to(gl.int64) * stride_out
    real = first_token + token < query_len
    gl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
def _find_row(query_start, block, num_rows, TOKENS: gl.constexpr):
    """The row that owns query block `block`: row i begins at block (query_start[i] - query_start[0]) // TOKENS + i."""
    origin = gl.load(query_start)
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if (gl.load(query_start + middle) - origin) // TOKENS + middle <= block:
            left = middle + 1
        else:
            right = middle
    return left - 1


@gluon.jit(do_not_specialize=["num_rows", "row_of_block"])
def _prefill_attention_kernel(
    out, query, keys, values, query_start, seq_lens, block_table, num_rows, row_of_block, scale,
    stride_out, stride_table,
    GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """One program: 128 queries of a row, one head."""
    PAGES: gl.constexpr = TILE // PAGE
    CHUNKS: gl.constexpr = DIM // 64
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    head = gl.program_id(0)
    # The last query blocks of a prompt see the most keys: they go first, so that none is left over at the end.
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    row = _find_row(query_start, block, num_rows, 128)
    start = gl.load(query_start + row)
    first_token = (block - (start - gl.load(query_start)) // 128 - row) * 128
    query_len = gl.load(query_start + row + 1) - start
    if first_token < query_len:
        seq_len = gl.load(seq_lens + row)
        cached = seq_len - query_len
        first_pos = cached + first_token
        last_key = cached + gl.minimum(first_token + 128, query_len)
        num_tiles = (last_key + TILE - 1) // TILE
        num_masked = num_tiles - (first_pos + 1) // TILE
        dtype: gl.constexpr = out.dtype.element_ty
        query_smem = gl.allocate_shared_memory(dtype, [2 * CHUNKS, 64, 64], KIND)
        key_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES * CHUNKS * PAGES, PAGE, 64], KIND)
        value_smem = gl.allocate_shared_memory(dtype, [NUM_STAGES * CHUNKS * PAGES, PAGE, 64], KIND)
        query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        key_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        key_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        value_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        value_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(query_ready, count=1)
        for stage in gl.static_range(NUM_STAGES):
            mbarrier.init(key_ready.index(stage), count=1)
            mbarrier.init(key_free.index(stage), count=2)
            mbarrier.init(value_ready.index(stage), count=1)
            mbarrier.init(value_free.index(stage), count=2)
        fence_async_shared()
        table = block_table + row.to(gl.int64) * stride_table
        place = out + head * DIM
        gl.warp_specialize([
            (_attend, (
                place, query_smem, key_smem, value_smem, query_ready, key_ready, key_free, value_ready, value_free,
                first_token, first_pos, query_len, seq_len, start + first_token, stride_out, num_tiles, num_masked,
                scale, 0, PAGE, TILE, NUM_STAGES, DIM,
            )),
            (_attend, (
                place, query_smem, key_smem, value_smem, query_ready, key_ready, key_free, value_ready, value_free,
                first_token, first_pos, query_len, seq_len, start + first_token, stride_out, num_tiles, num_masked,
                scale, 1, PAGE, TILE, NUM_STAGES, DIM,
            )),
            (_fetch, (
                keys, values, query, query_smem, key_smem, value_smem, query_ready, key_ready, key_free, value_ready,
                value_free, table, row_of_block, start + first_token, head * DIM, head // GROUPS * DIM, num_tiles,
                seq_len, BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM,
            )),
        ], [4, 1], [232, 40])  # fmt: skip


def pays(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such a layer on the current device: Hopper only, half precision."""
    sizes = head_dim in (64, 128) and block_size in (16, 32, 64, 128, 256)
    return sizes and dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability() == (9, 0)


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    out: Tensor,
) -> Tensor:
    """As `attention.paged_attention` without window, cap, sinks or slopes, for shapes that `pays` accepts.

    The first row need not begin at token 0; `out` [T, H, D], contiguous, is filled where rows own tokens.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    page = min(block_size, BLOCK_N)
    kind = gl.NVMMASharedLayout(128, 16, 2)
    stride_block, stride_token = kv_cache.stride(1), kv_cache.stride(2)
    rows = (kv_cache.shape[1] - 1) * (stride_block // stride_token) + block_size
    paged = [
        TensorDescriptor(part, [rows, kv_heads * head_dim], [stride_token, 1], [page, CHUNK], kind)
        for part in kv_cache.unbind(0)
    ]
    queries = TensorDescriptor(query, [num_tokens, num_heads * head_dim], [query.stride(0), 1], [HALF_M, CHUNK], kind)
    blocks = num_tokens // BLOCK_M + len(seq_lens)
    _prefill_attention_kernel[(num_heads, blocks)](
        out, queries, *paged, query_start, seq_lens, block_table, len(seq_lens), stride_block // stride_token,
        scale * _LOG2E, out.stride(0), block_table.stride(0),
        GROUPS=num_heads // kv_heads, BLOCK_SIZE=block_size, PAGE=page, TILE=BLOCK_N, NUM_STAGES=STAGES, DIM=head_dim,
        num_warps=4,
    )  # fmt: skip
    return out
