"""Causal attention of prompts over the paged cache, for Hopper, in Gluon; the plain twin: `attention.paged_attention`.

Here: which queries a program serves, and the launch; what it does with them is in `prefill_tiles`. Knows no request and
no layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .linear_invariant import num_multiprocessors
from .prefill_tiles import attend, fetch, window_tiles

#: Queries of a program, and of each of its two warpgroups.
BLOCK_M = 128
HALF_M = 64
#: Tiles in flight.
STAGES = 2
#: Features of one bulk copy: 128 bytes, the widest swizzle.
CHUNK = 64

_LOG2E = 1.4426950408889634


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


@gluon.jit
def _locate(query_start, seq_lens, block, num_rows, TILE: gl.constexpr):
    """What query block `block` holds; it is empty where its first token is not below the row's length."""
    row = _find_row(query_start, block, num_rows, 128)
    start = gl.load(query_start + row)
    first_token = (block - (start - gl.load(query_start)) // 128 - row) * 128
    query_len = gl.load(query_start + row + 1) - start
    seq_len = gl.load(seq_lens + row)
    cached = seq_len - query_len
    first_pos = cached + first_token
    num_tiles = (cached + gl.minimum(first_token + 128, query_len) + TILE - 1) // TILE
    num_masked = num_tiles - (first_pos + 1) // TILE
    return row, start, first_token, query_len, seq_len, first_pos, num_tiles, num_masked


@gluon.jit
def _next_block(turn, num_heads, num_blocks):
    """(block, head) of the program's turn; blocks below 0 are none. Every other turn goes the other way round.

    The last query blocks of a prompt see the most keys: they go first, so that none is left over at the end.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    item = turn * programs + program + (turn & 1) * (programs - 1 - 2 * program)
    return num_blocks - 1 - item // num_heads, item % num_heads


@gluon.jit
def _num_turns(num_heads, num_blocks):
    return (num_heads * num_blocks + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _attend_turns(
    out, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready, value_free,
    sinks, query_start, seq_lens, num_rows, num_blocks, num_heads, stride_out, scale, squash,
    half, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    """One warpgroup of a program that serves several query blocks."""
    served = 0
    begun = 0
    for turn in range(_num_turns(num_heads, num_blocks)):
        block, head = _next_block(turn, num_heads, num_blocks)
        if block >= 0:
            _, start, first_token, query_len, seq_len, first_pos, num_tiles, num_masked = _locate(
                query_start, seq_lens, block, num_rows, TILE
            )
            if first_token < query_len:
                attend(
                    out + head * HEAD_DIM, query_smem, key_smem, value_smem, query_ready, query_free, key_ready,
                    key_free, value_ready, value_free, sinks + head, first_token, first_pos, query_len, seq_len,
                    start + first_token, stride_out, num_tiles, num_masked, scale, squash, served, begun,
                    half, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, SOFT_CAP, SINKS, True,
                )  # fmt: skip
                begun += num_tiles - window_tiles(first_pos, num_tiles, TILE, WINDOW)[1]
                served += 1


@gluon.jit
def _fetch_turns(
    keys, values, query, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
    value_free, query_start, seq_lens, block_table, num_rows, num_blocks, num_heads, row_of_block, stride_table,
    GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr,
    DIM: gl.constexpr, HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The fetching warp of such a program, which is ahead of the others by as much as the shared memory holds."""
    served = 0
    begun = 0
    for turn in range(_num_turns(num_heads, num_blocks)):
        block, head = _next_block(turn, num_heads, num_blocks)
        if block >= 0:
            row, start, first_token, query_len, seq_len, first_pos, num_tiles, _ = _locate(
                query_start, seq_lens, block, num_rows, TILE
            )
            if first_token < query_len:
                STEP: gl.constexpr = DIM if HEAD_DIM == DIM else 1
                fetch(
                    keys, values, query, query_smem, key_smem, value_smem, query_ready, query_free, key_ready,
                    key_free, value_ready, value_free, block_table + row.to(gl.int64) * stride_table, row_of_block,
                    start + first_token, head * STEP, head // GROUPS * STEP, first_pos, num_tiles, seq_len, served,
                    begun, BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, True,
                )  # fmt: skip
                begun += num_tiles - window_tiles(first_pos, num_tiles, TILE, WINDOW)[1]
                served += 1


@gluon.jit(
    do_not_specialize=["num_rows", "row_of_block", "num_blocks"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "block_table"],
)
def _prefill_attention_kernel(
    out, query, keys, values, query_start, seq_lens, block_table, num_rows, row_of_block, scale,
    stride_out, stride_table, num_blocks, num_heads, squash, sinks,
    GROUPS: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr,
    NUM_STAGES: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr, REPEATED: gl.constexpr,
):  # fmt: skip
    """One program: 128 queries of a row, one head; with REPEATED, as many such blocks as are its share."""
    CHUNKS: gl.constexpr = DIM // 64
    PARTS: gl.constexpr = NUM_STAGES * CHUNKS * (TILE // PAGE)
    WIDE: gl.constexpr = HEAD_DIM == DIM
    QUERY_PART: gl.constexpr = [2 * CHUNKS, 64, 64] if WIDE else [2 * CHUNKS, 64, 1, 64]
    CACHE_PART: gl.constexpr = [PARTS, PAGE, 64] if WIDE else [PARTS, PAGE, 1, 64]
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2 if WIDE else 3)
    STEP: gl.constexpr = DIM if WIDE else 1
    head = gl.program_id(0)
    # The last query blocks of a prompt see the most keys: they go first, so that none is left over at the end.
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    row, start, first_token, query_len, seq_len, first_pos, num_tiles, num_masked = _locate(
        query_start, seq_lens, block, num_rows, TILE
    )
    if REPEATED or first_token < query_len:
        dtype: gl.constexpr = out.dtype.element_ty
        query_smem = gl.allocate_shared_memory(dtype, QUERY_PART, KIND)
        key_smem = gl.allocate_shared_memory(dtype, CACHE_PART, KIND)
        value_smem = gl.allocate_shared_memory(dtype, CACHE_PART, KIND)
        query_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        query_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        key_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        key_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        value_ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        value_free = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(query_ready, count=1)
        if REPEATED:
            mbarrier.init(query_free, count=2)
        for stage in gl.static_range(NUM_STAGES):
            mbarrier.init(key_ready.index(stage), count=1)
            mbarrier.init(key_free.index(stage), count=2)
            mbarrier.init(value_ready.index(stage), count=1)
            mbarrier.init(value_free.index(stage), count=2)
        fence_async_shared()
        # as values and not as constants, so that what both warpgroups do is traced once
        first, second = gl.to_tensor(0), gl.to_tensor(1)
        if REPEATED:
            gl.warp_specialize([
                (_attend_turns, (
                    out, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
                    value_free, sinks, query_start, seq_lens, num_rows, num_blocks, num_heads, stride_out, scale,
                    squash, first, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, SOFT_CAP, SINKS,
                )),
                (_attend_turns, (
                    out, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
                    value_free, sinks, query_start, seq_lens, num_rows, num_blocks, num_heads, stride_out, scale,
                    squash, second, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, SOFT_CAP, SINKS,
                )),
                (_fetch_turns, (
                    keys, values, query, query_smem, key_smem, value_smem, query_ready, query_free, key_ready,
                    key_free, value_ready, value_free, query_start, seq_lens, block_table, num_rows, num_blocks,
                    num_heads, row_of_block, stride_table,
                    GROUPS, BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW,
                )),
            ], [4, 1], [232, 40])  # fmt: skip
        else:
            table = block_table + row.to(gl.int64) * stride_table
            place = out + head * HEAD_DIM
            gl.warp_specialize([
                (attend, (
                    place, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
                    value_free, sinks + head, first_token, first_pos, query_len, seq_len, start + first_token,
                    stride_out, num_tiles, num_masked, scale, squash, 0, 0,
                    first, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, SOFT_CAP, SINKS, False,
                )),
                (attend, (
                    place, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
                    value_free, sinks + head, first_token, first_pos, query_len, seq_len, start + first_token,
                    stride_out, num_tiles, num_masked, scale, squash, 0, 0,
                    second, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, SOFT_CAP, SINKS, False,
                )),
                (fetch, (
                    keys, values, query, query_smem, key_smem, value_smem, query_ready, query_free, key_ready,
                    key_free, value_ready, value_free, table, row_of_block, start + first_token, head * STEP,
                    head // GROUPS * STEP, first_pos, num_tiles, seq_len, 0, 0,
                    BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW, False,
                )),
            ], [4, 1], [232, 40])  # fmt: skip


def serves(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such a layer on the current device: Hopper only, half precision."""
    sizes = head_dim in (64, 80, 96, 128, 256) and block_size in (16, 32, 64, 128, 256)
    return sizes and dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_capability() == (9, 0)


def prefill_attention(
    query: Tensor,
    kv_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    persistent: bool = False,
    out: Tensor,
) -> Tensor:
    """As `attention.paged_attention` without slopes, for shapes that `serves` accepts; `scale` must be above 0.

    The first row need not begin at token 0; `out` [T, H, D], contiguous, is filled where rows own tokens. With
    `persistent` there is one program for each multiprocessor, which fetches the next queries while it ends the last.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, kv_heads = kv_cache.shape[2], kv_cache.shape[3]
    dim = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    tile = 64 if dim > 128 else 128
    page = min(block_size, tile)
    stride_block, stride_token = kv_cache.stride(1), kv_cache.stride(2)
    rows = (kv_cache.shape[1] - 1) * (stride_block // stride_token) + block_size
    paged = [_descriptor(part, rows, stride_token, kv_heads, page, dim) for part in kv_cache.unbind(0)]
    queries = _descriptor(query, num_tokens, query.stride(0), num_heads, HALF_M, dim)
    blocks = num_tokens // BLOCK_M + len(seq_lens)
    grid = (num_heads, blocks)
    if persistent:
        grid = (min(num_multiprocessors(query.device), num_heads * blocks), 1)
    _prefill_attention_kernel[grid](
        out, queries, *paged, query_start, seq_lens, block_table, len(seq_lens), stride_block // stride_token,
        (soft_cap or scale) * _LOG2E, out.stride(0), block_table.stride(0), blocks, num_heads,
        scale / soft_cap if soft_cap else 1.0, out if sinks is None else sinks,
        GROUPS=num_heads // kv_heads, BLOCK_SIZE=block_size, PAGE=page, TILE=tile, NUM_STAGES=STAGES, DIM=dim,
        HEAD_DIM=head_dim, WINDOW=window, SOFT_CAP=soft_cap > 0, SINKS=sinks is not None, REPEATED=persistent,
        num_warps=4,
    )  # fmt: skip
    return out


def _descriptor(memory: Tensor, rows: int, stride: int, heads: int, copied: int, dim: int) -> TensorDescriptor:
    """For bulk copies of `copied` rows and 64 features; narrow heads get an axis, so that what lies behind is zeros."""
    head_dim = memory.shape[-1]
    if head_dim == dim:
        kind = gl.NVMMASharedLayout(128, 16, 2)
        return TensorDescriptor(memory, [rows, heads * head_dim], [stride, 1], [copied, CHUNK], kind)
    kind = gl.NVMMASharedLayout(128, 16, 3)
    return TensorDescriptor(memory, [rows, heads, head_dim], [stride, head_dim, 1], [copied, 1, CHUNK], kind)
