"""Attention of many rows to a prefix that they share, in Triton: each key is read once for a tile of rows.

The first half of cascade attention (Juravsky et al. 2024, Ye et al. 2024): the query heads of the rows that share a
prefix form one dense tile against its keys, in several splits. What comes out are parts with their log-sum-exp, which
`decode_attention` joins with each row's own rest. Needs no mask: a shared token lies before every query. Knows no
request and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import at_head, attend_keys, scales_of
from .chain import await_previous, chained
from .decode import PrefixParts, room_for
from .paged import layer_of, paged_cache, scores_of
from .spans import PREFIX_ALIGN, prefix_span, prefix_splits


@dataclass(frozen=True)
class PrefixLaunch:
    """Sizes of one launch: keys of a tile (a divisor of PREFIX_ALIGN) and most splits of a prefix.

    Prefixes have as many splits as make `programs` of all tiles of a KV head, up to the most.
    """

    block_n: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 1 << 20


def launch_for(head_dim: int, groups: int, dtype: torch.dtype, splits: int, programs: int = 1 << 20) -> PrefixLaunch:
    """The sizes that suit a layer of `groups` query heads for each KV head."""
    warps = 8 if groups > 4 else 4
    if dtype.itemsize > 2 or head_dim > 128:
        return PrefixLaunch(32, splits, warps, 2, programs)
    return PrefixLaunch(64, splits, warps, 3, programs)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "programs"])
def _prefix_attention_kernel(
    partial, lse, query, cache, tiles, rows, scores, num_rows, num_tiles, programs, stride_query, stride_table,
    LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows, the heads of one KV head, one split of the prefix."""
    GROUPS: tl.constexpr = LAYER.groups
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    DIM: tl.constexpr = LAYER.dim
    tile_rows, tile_lens = tiles
    seq_lens, block_table = rows
    await_previous(CHAINED, LONG=True)
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(tile_lens + tile) // PREFIX_ALIGN * PREFIX_ALIGN
    span = prefix_span(length, prefix_splits(tile_lens, num_tiles, programs, tl.num_programs(2)))
    low = split * span
    if low >= length:
        return
    high = tl.minimum(low + span, length)
    lane, dim = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    row = tl.load(tile_rows + tile * ROWS + lane // GROUPS, lane < ROWS * GROUPS, other=-1)
    real = (row >= 0) & (row < num_rows)
    row = tl.where(real, row, 0).to(tl.int64)
    head = kv_head * GROUPS + lane % GROUPS
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(query + (row * stride_query + head * HEAD_DIM)[:, None] + dim[None, :], within, other=0.0)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    query_pos = tl.zeros([BLOCK_M], tl.int32)
    if scores.alibi_slopes is not None:
        slopes = tl.load(scores.alibi_slopes + head, real, other=0.0).to(tl.float32)
        query_pos = tl.load(seq_lens + row, real, other=1) - 1
    table = block_table + tl.load(tile_rows + tile * ROWS).to(tl.int64) * stride_table
    cache = at_head(cache, kv_head)
    scale, value_scale = scales_of(scores, kv_head)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for at in range(low, high, BLOCK_N):
        acc, peak, total = attend_keys(
            acc, peak, total, queries, query_pos, at, 0, length, cache, table, scores, scale, slopes,
            LAYER, BLOCK_N, False,
        )  # fmt: skip
    acc = acc / total[:, None] * value_scale
    place = (row * (tl.num_programs(1) * GROUPS) + head) * PARTS + split
    tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], acc, within)
    tl.store(lse + place, peak + tl.log2(total), real)


def prefix_attention(
    query: Tensor,
    kv_cache: Tensor,
    tile_rows: Tensor,
    tile_lens: Tensor,
    row_lens: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    launch: PrefixLaunch,
    own_splits: int,
    soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
) -> PrefixParts:
    """The parts of rows [B] of one token each over the first tokens that they share, for `decode_attention`.

    `tile_rows` int32 [tiles, ROWS] are rows whose tables begin alike, first the one whose table is read (-1: none, rows
    from B on are skipped); `tile_lens` int32 [tiles] how many tokens (0: an unused tile), `row_lens` int32 [B] the same
    by row. The lengths are read on the device and cut to multiples of PREFIX_ALIGN. `own_splits` are the splits with
    which the rest will be attended.
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    groups, rows = num_heads // kv_heads, tile_rows.shape[1]
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    shape = (num_rows, num_heads, room_for(launch.splits + own_splits))
    partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    _prefix_attention_kernel[(len(tile_lens), kv_heads, launch.splits)](
        partial, lse, query, paged_cache(kv_cache), (tile_rows, tile_lens), (seq_lens, block_table),
        scores_of(scale, soft_cap, None, alibi_slopes, key_scale, value_scale),
        num_rows, len(tile_lens), launch.programs, query.stride(0), block_table.stride(0),
        LAYER=layer_of(query, kv_cache), ROWS=rows, BLOCK_M=max(16, triton.next_power_of_2(rows * groups)),
        BLOCK_N=launch.block_n, PARTS=shape[2],
        num_warps=launch.num_warps, num_stages=launch.num_stages, **chained(query.device),
    )  # fmt: skip
    return PrefixParts(row_lens, tile_lens, launch.splits, launch.programs, partial, lse)
