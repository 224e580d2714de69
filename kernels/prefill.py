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
from .prefill_arguments import Queries, Shape, Tiles
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
    """(row, queries) of query block `block`; it is empty where its first token is not below the row's length."""
    row = _find_row(query_start, block, num_rows, 128)
    start = gl.load(query_start + row)
    first_token = (block - (start - gl.load(query_start)) // 128 - row) * 128
    query_len = gl.load(query_start + row + 1) - start
    seq_len = gl.load(seq_lens + row)
    cached = seq_len - query_len
    first_pos = cached + first_token
    num_tiles = (cached + gl.minimum(first_token + 128, query_len) + TILE - 1) // TILE
    num_masked = num_tiles - (first_pos + 1) // TILE
    return row, Queries(start + first_token, first_token, first_pos, query_len, seq_len, num_tiles, num_masked)


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
    out, queries, keys, values, sinks, query_start, seq_lens, num_rows, num_blocks, num_heads, stride_out, scales, half,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup of a program that serves several query blocks."""
    served = 0
    begun = 0
    for turn in range(_num_turns(num_heads, num_blocks)):
        number, head = _next_block(turn, num_heads, num_blocks)
        if number >= 0:
            _, block = _locate(query_start, seq_lens, number, num_rows, SHAPE.tile)
            if block.first_token < block.query_len:
                attend(
                    out + head * SHAPE.head_dim, queries, keys, values, sinks + head, block, stride_out, scales,
                    served, begun, half, SHAPE,
                )  # fmt: skip
                begun += block.num_tiles - window_tiles(block.first_pos, block.num_tiles, SHAPE.tile, SHAPE.window)[1]
                served += 1


@gluon.jit
def _fetch_turns(
    query_source, key_source, value_source, queries, keys, values, query_start, seq_lens, block_table, num_rows,
    num_blocks, num_heads, row_of_block, stride_table, SHAPE: gl.constexpr,
):  # fmt: skip
    """The fetching warp of such a program, which is ahead of the others by as much as the shared memory holds."""
    served = 0
    begun = 0
    for turn in range(_num_turns(num_heads, num_blocks)):
        number, head = _next_block(turn, num_heads, num_blocks)
        if number >= 0:
            row, block = _locate(query_start, seq_lens, number, num_rows, SHAPE.tile)
            if block.first_token < block.query_len:
                STEP: gl.constexpr = SHAPE.dim if SHAPE.head_dim == SHAPE.dim else 1
                fetch(
                    query_source, key_source, value_source, queries, keys, values, block,
                    block_table + row.to(gl.int64) * stride_table, row_of_block, head * STEP,
                    head // SHAPE.groups * STEP, served, begun, SHAPE,
                )  # fmt: skip
                begun += block.num_tiles - window_tiles(block.first_pos, block.num_tiles, SHAPE.tile, SHAPE.window)[1]
                served += 1


@gluon.jit(
    do_not_specialize=["num_rows", "row_of_block", "num_blocks"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "block_table"],
)
def _prefill_attention_kernel(
    out, query, key, value, query_start, seq_lens, block_table, num_rows, row_of_block, num_blocks, num_heads,
    stride_out, stride_table, scales, sinks, SHAPE: gl.constexpr,
):  # fmt: skip
    """One program: 128 queries of a row, one head; if SHAPE.repeated, as many such blocks as are its share."""
    PAGE: gl.constexpr = SHAPE.page
    NUM_STAGES: gl.constexpr = SHAPE.num_stages
    CHUNKS: gl.constexpr = SHAPE.dim // 64
    PARTS: gl.constexpr = NUM_STAGES * CHUNKS * (SHAPE.tile // PAGE)
    WIDE: gl.constexpr = SHAPE.head_dim == SHAPE.dim
    QUERY_PART: gl.constexpr = [2 * CHUNKS, 64, 64] if WIDE else [2 * CHUNKS, 64, 1, 64]
    CACHE_PART: gl.constexpr = [PARTS, PAGE, 64] if WIDE else [PARTS, PAGE, 1, 64]
    RING: gl.constexpr = [NUM_STAGES, 1]
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2 if WIDE else 3)
    STEP: gl.constexpr = SHAPE.dim if WIDE else 1
    head = gl.program_id(0)
    # The last query blocks of a prompt see the most keys: they go first, so that none is left over at the end.
    row, block = _locate(query_start, seq_lens, gl.num_programs(1) - 1 - gl.program_id(1), num_rows, SHAPE.tile)
    if SHAPE.repeated or block.first_token < block.query_len:
        dtype: gl.constexpr = out.dtype.element_ty
        queries = Tiles(gl.allocate_shared_memory(dtype, QUERY_PART, KIND), _barriers([1]), _barriers([1]))
        keys = Tiles(gl.allocate_shared_memory(dtype, CACHE_PART, KIND), _barriers(RING), _barriers(RING))
        values = Tiles(gl.allocate_shared_memory(dtype, CACHE_PART, KIND), _barriers(RING), _barriers(RING))
        mbarrier.init(queries.ready, count=1)
        if SHAPE.repeated:
            mbarrier.init(queries.free, count=2)
        for stage in gl.static_range(NUM_STAGES):
            mbarrier.init(keys.ready.index(stage), count=1)
            mbarrier.init(keys.free.index(stage), count=2)
            mbarrier.init(values.ready.index(stage), count=1)
            mbarrier.init(values.free.index(stage), count=2)
        fence_async_shared()
        # as values and not as constants, so that what both warpgroups do is traced once
        first, second = gl.to_tensor(0), gl.to_tensor(1)
        if SHAPE.repeated:
            gl.warp_specialize([
                (_attend_turns, (
                    out, queries, keys, values, sinks, query_start, seq_lens, num_rows, num_blocks, num_heads,
                    stride_out, scales, first, SHAPE,
                )),
                (_attend_turns, (
                    out, queries, keys, values, sinks, query_start, seq_lens, num_rows, num_blocks, num_heads,
                    stride_out, scales, second, SHAPE,
                )),
                (_fetch_turns, (
                    query, key, value, queries, keys, values, query_start, seq_lens, block_table, num_rows, num_blocks,
                    num_heads, row_of_block, stride_table, SHAPE,
                )),
            ], [4, 1], [232, 40])  # fmt: skip
        else:
            table = block_table + row.to(gl.int64) * stride_table
            place = out + head * SHAPE.head_dim
            gl.warp_specialize([
                (attend, (
                    place, queries, keys, values, sinks + head, block, stride_out, scales, 0, 0, first, SHAPE,
                )),
                (attend, (
                    place, queries, keys, values, sinks + head, block, stride_out, scales, 0, 0, second, SHAPE,
                )),
                (fetch, (
                    query, key, value, queries, keys, values, block, table, row_of_block, head * STEP,
                    head // SHAPE.groups * STEP, 0, 0, SHAPE,
                )),
            ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def _barriers(shape: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, shape, mbarrier.MBarrierLayout())


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
    shape = Shape(
        num_heads // kv_heads, block_size, page, tile, STAGES, dim, head_dim, window,
        soft_cap=soft_cap > 0, sinks=sinks is not None, repeated=persistent,
    )  # fmt: skip
    scales = ((soft_cap or scale) * _LOG2E, scale / soft_cap if soft_cap else 1.0)
    _prefill_attention_kernel[grid](
        out, queries, *paged, query_start, seq_lens, block_table, len(seq_lens), stride_block // stride_token, blocks,
        num_heads, out.stride(0), block_table.stride(0), scales, out if sinks is None else sinks,
        SHAPE=shape, num_warps=4,
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
