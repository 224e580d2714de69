"""Paged attention and cache writes in Triton; the references are in `frame.core.ops.attention`.

out = softmax(scale · q kᵀ) v with the running maximum and sum of Milakov & Gimelshein 2018, tile by tile as in
FlashAttention (Dao et al. 2022). The query heads of one KV head share a tile, so that a key is loaded once for all of
them. Softmax runs in base 2. Serves any mix of rows; `decode` and `prefill` are quicker where they apply. Knows no
request and no layer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import E4M3_TO_BF16
from .merge import join_rows
from .paged import PagedCache, cache_scales, layer_of, limit_of, paged_cache, scores_of

LOG2E = tl.constexpr(1.4426950408889634)
#: The interpreter takes no assembly.
_ASM = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@dataclass(frozen=True)
class Launch:
    """Sizes of one launch: query rows and keys of a tile, its pipeline, and parts that a row's keys are divided into.

    Launches of equal sizes give a token the same bits whatever other rows there are.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 1


#: Keys of a tile where bits may depend on the row alone.
INVARIANT_KEYS = 32


def one_warp(head_dim: int, groups: int, dtype: torch.dtype) -> bool:
    """Whether one warp holds a tile of queries, so that launches of 16 and of 32 rows give a row the same bits.

    With more warps a tile's scores may be shared by two of them, whose sums are then added in another order.
    """
    return dtype.itemsize == 2 and head_dim <= 128 and groups <= 16


def launch_for(head_dim: int, groups: int, dtype: torch.dtype, *, invariant: bool = False, few: bool = False) -> Launch:
    """The tile sizes that suit a layer; `invariant` gives one shape for every batch, `few` those of few new tokens."""
    wide = dtype.itemsize > 2 or head_dim > 128
    padded = max(32, triton.next_power_of_2(groups))
    if invariant and one_warp(head_dim, groups, dtype):
        return Launch(padded, INVARIANT_KEYS, 1, 3)
    if invariant:
        return Launch(padded, INVARIANT_KEYS, 4, 2)
    if dtype.itemsize > 2:
        return Launch(padded, 32, 4, 2)
    if few and not wide:
        return Launch(max(64, padded), 64, 4, 3)
    return Launch(max(128, padded), 32, 8 if wide else 4, 2 if wide else 3)


@triton.jit
def _find_row(query_start, block, num_rows, BLOCK_Q: tl.constexpr):
    """The row that owns query block `block`: row i begins at block (query_start[i] - query_start[0]) // BLOCK_Q + i."""
    origin = tl.load(query_start)
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if (tl.load(query_start + middle) - origin) // BLOCK_Q + middle <= block:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _tanh(x):
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def held(num_tokens, LAYER: tl.constexpr):
    """How many of a row's first `num_tokens` are in the cache."""
    if LAYER.ranks > 1:
        num_tokens = (num_tokens - LAYER.rank + LAYER.ranks - 1) // LAYER.ranks
    return num_tokens


@triton.jit
def last_held(position, LAYER: tl.constexpr):
    """The number, among the tokens in the cache, of the last one that the token at `position` may see; -1 for none."""
    if LAYER.ranks > 1:
        position = held(position + 1, LAYER) - 1
    return position


@triton.jit
def own_slot(slot, RANKS: tl.constexpr, RANK: tl.constexpr):
    """The slot in this cache; negative where another rank holds the token."""
    if RANKS > 1:
        slot = tl.where((slot >= 0) & (slot % RANKS == RANK), slot // RANKS, -1)
    return slot


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Keys or values as a product takes them. To bfloat16 a chip converts no 8-bit floats: their bits are moved."""
    if _ASM and x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        bits = x.to(tl.int8, bitcast=True)
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [bits], dtype=tl.bfloat16, is_pure=True, pack=4)
    return x.to(dtype)


@triton.jit
def at_head(cache, head):
    """The cache of one KV head."""
    offset = head * cache.stride_head
    return PagedCache(
        cache.key + offset, cache.value + offset, cache.stride_block, cache.stride_token, cache.stride_head
    )


@triton.jit
def scales_of(scores, kv_head):
    """(the factor of scores, the factor of the output) of one KV head."""
    scale, value_scale = scores.scale, scores.value_scale
    if scores.heads.key is not None:
        scale *= tl.load(scores.heads.key + kv_head)
        value_scale *= tl.load(scores.heads.value + kv_head)
    return scale, value_scale


@triton.jit
def attend_keys(
    acc, peak, total, query, query_pos, start, first_key, last_key, cache, table, scores, scale, slopes,
    LAYER: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys from `start` on: updates (acc, peak, total). Only [first_key, last_key) may be read.

    `scale` is that of the KV head's scores.
    A tile without a mask gives the bits of one whose mask hides nothing: what compilers might fuse is fused here.
    """
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    DIM: tl.constexpr = LAYER.dim
    position = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM)
    known = (position >= first_key) & (position < last_key)
    if MASKED:
        block = tl.load(table + position // LAYER.block_size, mask=known, other=0)
    else:
        block = tl.load(table + position // LAYER.block_size)
    place = block.to(tl.int64) * cache.stride_block + (position % LAYER.block_size) * cache.stride_token
    if MASKED or DIM != HEAD_DIM:
        readable = known[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(cache.key + place[:, None] + dim[None, :], mask=readable, other=0.0)
        value = tl.load(cache.value + place[:, None] + dim[None, :], mask=readable, other=0.0)
    else:
        key = tl.load(cache.key + place[:, None] + dim[None, :])
        value = tl.load(cache.value + place[:, None] + dim[None, :])
    score = tl.dot(query, tl.trans(widened(key, query.dtype)), input_precision="ieee")
    factor = scale * LOG2E  # of a score, for softmax in base 2
    if scores.soft_cap is not None:
        score = _tanh(score * (scale / scores.soft_cap))
        factor = scores.soft_cap * LOG2E
    if scores.alibi_slopes is not None:
        distance = (position[None, :] - query_pos[:, None]).to(tl.float32)
        score = tl.fma(score, factor, (slopes * LOG2E)[:, None] * distance)
        factor = 1.0
    if MASKED:
        visible = known[None, :] & (position[None, :] <= query_pos[:, None])
        if LAYER.window > 0:
            visible &= position[None, :] > query_pos[:, None] - LAYER.window
        score = tl.where(visible, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1) * factor)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - base)
    weight = tl.exp2(tl.fma(score, factor, -base[:, None]))
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(query.dtype), widened(value, query.dtype), acc * shrink[:, None], input_precision="ieee")
    return acc, new_peak, total


# Decodes come first in a step, so the alignment of the rest depends on their number.
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "block_table"],
)
def _paged_attention_kernel(
    out, lse, queries, cache, query_start, seq_lens, block_table, scores, num_rows, stride_table, num_heads, num_tokens,
    LAYER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M // GROUPS query tokens of a row, the heads of one KV head.

    With SPLIT it sees one part of their keys, and `out` and `lse` have a place for each part, of `num_tokens` tokens.
    """
    GROUPS: tl.constexpr = LAYER.groups
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    DIM: tl.constexpr = LAYER.dim
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUPS
    query, stride_query, stride_query_head = queries
    kv_head = tl.program_id(1)
    # The last query blocks of a prompt see the most keys: they go first, so that none is left over at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = _find_row(query_start, block, num_rows, BLOCK_Q)
    start = tl.load(query_start + row)
    first_token = (block - (start - tl.load(query_start)) // BLOCK_Q - row) * BLOCK_Q
    query_len = tl.load(query_start + row + 1) - start
    if first_token >= query_len:
        return
    cached = tl.load(seq_lens + row) - query_len
    lane, dim = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    token, head = first_token + lane // GROUPS, kv_head * GROUPS + lane % GROUPS
    real = (lane < BLOCK_Q * GROUPS) & (token < query_len)
    place = (start + token).to(tl.int64)
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    query_tile = tl.load(
        query + place[:, None] * stride_query + (head * stride_query_head)[:, None] + dim[None, :], within, other=0.0
    )
    query_pos = last_held(cached + token, LAYER)
    # Keys [first_key, last_key) are those that some query of this program may see; tiles lie at absolute positions.
    last_key = held(tl.maximum(cached + tl.minimum(first_token + BLOCK_Q, query_len), 0), LAYER)
    first_pos = last_held(cached + first_token, LAYER)
    first_key = 0
    if LAYER.window > 0:
        first_key = tl.maximum(first_pos - LAYER.window + 1, 0)
    low = first_key // BLOCK_N * BLOCK_N
    full = low
    if LAYER.window == 0:
        full = tl.maximum(tl.minimum(last_key, first_pos + 1) // BLOCK_N * BLOCK_N, low)
    part, end = tl.program_id(2), last_key
    if SPLIT:
        tiles = tl.cdiv(tl.maximum(last_key - low, 0), BLOCK_N)
        share = tl.cdiv(tiles, tl.num_programs(2)) * BLOCK_N
        low += part * share
        end = tl.minimum(low + share, last_key)
        full = tl.maximum(tl.minimum(full, end), low)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if scores.alibi_slopes is not None:
        slopes = tl.load(scores.alibi_slopes + head, real, other=0.0).to(tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if scores.sinks is not None:
        if part == 0:  # the others add to it
            peak = tl.load(scores.sinks + head, real, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    table = block_table + row.to(tl.int64) * stride_table
    cache = at_head(cache, kv_head)
    scale, value_scale = scales_of(scores, kv_head)
    for at in range(low, full, BLOCK_N):
        acc, peak, total = attend_keys(
            acc, peak, total, query_tile, query_pos, at, first_key, last_key, cache, table, scores, scale, slopes,
            LAYER, BLOCK_N, False,
        )  # fmt: skip
    for at in range(full, end, BLOCK_N):
        acc, peak, total = attend_keys(
            acc, peak, total, query_tile, query_pos, at, first_key, last_key, cache, table, scores, scale, slopes,
            LAYER, BLOCK_N, True,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
    if SPLIT:
        place += part.to(tl.int64) * num_tokens - tl.load(query_start)
    where = place * num_heads + head
    if lse is not None:
        tl.store(lse + where, log_sum(peak, total), real)
    tl.store(out + where[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), within)


@triton.jit
def log_sum(peak, total):
    """The natural log-sum-exp of scores from their peak and sum in base 2; -inf for no scores."""
    known = peak + tl.log2(tl.where(total == 0.0, 1.0, total))
    return tl.where(total == 0.0, float("-inf"), known) / LOG2E


@triton.jit
def inverses_of(scales, kv_head, real):
    """What keys and values of such KV heads are multiplied with before they are stored, where `real`."""
    for_keys, for_values = scales.inverse_key, scales.inverse_value
    if scales.heads.key is not None:
        for_keys = tl.div_rn(1.0, tl.load(scales.heads.key + kv_head, real, other=1.0))
        for_values = tl.div_rn(1.0, tl.load(scales.heads.value + kv_head, real, other=1.0))
    return for_keys, for_values


@triton.jit
def to_cache(x, inverse_scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """`x` as a cache of `dtype` holds it; LIMIT > 0 is the largest number of an 8-bit float."""
    if LIMIT > 0:
        x = x.to(tl.float32) * inverse_scale
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_kv_kernel(
    cache, key, value, slots, scales, stride_key, stride_value,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SIZE: tl.constexpr, LIMIT: tl.constexpr,
    RANKS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """One program stores one token's keys and values, all heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = own_slot(tl.load(slots + token), RANKS, RANK)
    if slot < 0:
        return
    lane = tl.arange(0, SIZE)
    real = lane < HEADS * HEAD_DIM
    place = (slot // BLOCK_SIZE) * cache.stride_block + (slot % BLOCK_SIZE) * cache.stride_token
    place += (lane // HEAD_DIM) * cache.stride_head + lane % HEAD_DIM
    for_keys = tl.load(key + token * stride_key + lane, real)
    for_values = tl.load(value + token * stride_value + lane, real)
    for_keys_by, for_values_by = inverses_of(scales, lane // HEAD_DIM, real)
    for_keys = to_cache(for_keys, for_keys_by, cache.key.dtype.element_ty, LIMIT)
    for_values = to_cache(for_values, for_values_by, cache.value.dtype.element_ty, LIMIT)
    tl.store(cache.key + place, for_keys, real)
    tl.store(cache.value + place, for_values, real)


def write_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    share: tuple[int, int] = (1, 0),
) -> None:
    """See the reference. The last axis of `kv_cache` must be dense; keys and values may be views of one projection.

    Of (ranks, rank) `share` the cache holds the tokens at positions that are rank modulo ranks, and only those are
    stored; a block of the slot mapping has ranks times as many tokens as one of the cache.
    """
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value = dense_heads(key), dense_heads(value)
    _write_kv_kernel[(num_tokens,)](
        paged_cache(kv_cache), key, value, slot_mapping, cache_scales(key_scale, value_scale),
        key.stride(0), value.stride(0),
        BLOCK_SIZE=kv_cache.shape[2], HEADS=num_heads, HEAD_DIM=head_dim,
        SIZE=triton.next_power_of_2(num_heads * head_dim), LIMIT=limit_of(kv_cache),
        RANKS=share[0], RANK=share[1],
    )  # fmt: skip


def paged_attention(
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
    alibi_slopes: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    launch: Launch | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    share: tuple[int, int] = (1, 0),
    first_token: int = 0,
) -> Tensor:
    """See the reference. `out` [T, H, D] is filled if given; the first row need not begin at token 0.

    `first_token` is at most the token at which it begins, so that no memory is taken for what is before it.

    Tokens that no row owns are left as they are in `out`, zero when it is not given. Float32 `lse` [T, H] is filled
    with log-sum-exps. `share` is as for `write_kv`: lengths and the window are of whole rows.
    """
    num_heads, head_dim = query.shape[1:]
    num_tokens, num_rows, kv_heads = len(query) - first_token, seq_lens.shape[0], kv_cache.shape[3]
    groups = num_heads // kv_heads
    launch = launch or launch_for(head_dim, groups, query.dtype)
    if query.stride(2) != 1:
        query = query.contiguous()
    if out is None:
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    if num_tokens == 0 or num_rows == 0:
        return out
    blocks = num_tokens // (launch.block_m // groups) + num_rows
    parts, lses = out, lse
    if launch.splits > 1:
        parts = torch.empty((launch.splits, num_tokens, *query.shape[1:]), dtype=torch.float32, device=query.device)
        lses = torch.empty(parts.shape[:3], dtype=torch.float32, device=query.device)
    _paged_attention_kernel[(blocks, kv_heads, launch.splits)](
        parts, lses, (query, query.stride(0), query.stride(1)), paged_cache(kv_cache),
        query_start, seq_lens, block_table, scores_of(scale, soft_cap, sinks, alibi_slopes, key_scale, value_scale),
        num_rows, block_table.stride(0), num_heads, num_tokens,
        LAYER=layer_of(query, kv_cache, window, share), BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        SPLIT=launch.splits > 1, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if lses is not None and launch.splits > 1:
        join_rows(parts, lses, query_start, out=out, lse=lse)
    return out


def dense_heads(x: Tensor) -> Tensor:
    """`x` [T, H, D] with each token's heads in one piece."""
    dense: Any = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if dense else x.contiguous()
