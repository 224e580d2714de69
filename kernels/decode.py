"""Paged attention for rows of one token each, in Triton; the references are in `frame.core.ops.attention`.

One launch does what a decode step needs of a layer: it stores the token's key and value, attends to the row's keys in
several splits at once, and lets the program that ends last join them (flash decoding, Dao et al. 2023). The query heads
of one KV head share a program, so that a key is read once for all of them. Knows no request and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import (
    INVARIANT_KEYS,
    LOG2E,
    at_head,
    attend_keys,
    dense_heads,
    held,
    inverses_of,
    log_sum,
    one_warp,
    own_slot,
    scales_of,
    to_cache,
)
from .chain import await_previous, chained
from .paged import Projected, Rows, Splitting, cache_scales, layer_of, paged_cache, scores_of
from .spans import PREFIX_ALIGN, own_span, prefix_span, prefix_splits

#: Sizes of the room for a row's parts: few, since each is a kernel of its own, for which a start waits.
PARTS = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class PrefixParts:
    """What `cascade` computed of the rows' shared first tokens, for `decode_attention` to join with the rest.

    `row_lens` int32 [B] and `tile_lens` int32 [tiles] tokens; at most `splits` parts of each row and head, by what
    `spans.prefix_splits` makes of `programs`, come first in float32 `out` [B, H, parts, D] and `lse` [B, H, parts],
    `parts` one of PARTS with room for those of the rest.
    """

    row_lens: Tensor
    tile_lens: Tensor
    splits: int
    programs: int
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class DecodeLaunch:
    """Sizes of one launch: padded query heads and keys of a tile, most splits of a row's keys (a power of two).

    With `min_span` a row has no more splits than whole spans: long rows are split evenly, short ones beside them not.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int = 2
    num_stages: int = 3
    min_span: int = 0


def launch_for(
    head_dim: int, groups: int, dtype: torch.dtype, splits: int = 1, *, long_tiles: bool = False
) -> DecodeLaunch:
    """The sizes that suit a layer; `long_tiles` of 64 keys by two warps where small programs do not fill the device."""
    wide = dtype.itemsize > 2 or head_dim > 128
    block_m = max(16, triton.next_power_of_2(groups))
    if block_m > 16:  # more query heads than the registers of two warps hold
        warps = 4 if block_m * triton.next_power_of_2(head_dim) <= 8192 else 8
        return DecodeLaunch(block_m, 32 if wide else 64, splits, warps, 2 if wide else 3)
    if wide:  # products of float32 are sums in registers
        return DecodeLaunch(block_m, 32, splits, 8 if dtype.itemsize > 2 else 2, 2)
    # where programs fill the device, many small programs read fastest
    return DecodeLaunch(block_m, 64, splits, 2, 3) if long_tiles else DecodeLaunch(block_m, 32, splits, 1, 4)


def invariant_launch(head_dim: int, groups: int, dtype: torch.dtype) -> DecodeLaunch | None:
    """What gives the bits of `attention.launch_for(..., invariant=True)`; None where nothing does.

    A row is not split, since the length of its splits would depend on the batch.
    """
    return DecodeLaunch(16, INVARIANT_KEYS, 1, 1, 4) if one_warp(head_dim, groups, dtype) else None


def room_for(parts: int) -> int:
    """The smallest of PARTS that holds `parts`."""
    return next(room for room in PARTS if room >= parts)


@triton.jit
def _store_token(cache, key, value, place, dim, inverses, LAYER: tl.constexpr):
    within = dim < LAYER.head_dim
    dtype: tl.constexpr = cache.key.dtype.element_ty
    for_keys = to_cache(tl.load(key + dim, within), inverses[0], dtype, LAYER.limit)
    for_values = to_cache(tl.load(value + dim, within), inverses[1], dtype, LAYER.limit)
    tl.store(cache.key + place + dim, for_keys, within)
    tl.store(cache.value + place + dim, for_values, within)


@triton.jit
def _join(
    out, whole_lse, partial, lse, first_head, used, LAYER: tl.constexpr, BLOCK_M: tl.constexpr, SPLITTING: tl.constexpr
):
    """out = Σ 2^(lse_i - peak) partial_i / Σ 2^(lse_i - peak) over the first `used` splits, for LAYER.groups heads."""
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    DIM: tl.constexpr = LAYER.dim
    SPLITS: tl.constexpr = SPLITTING.parts
    TOGETHER: tl.constexpr = SPLITTING.together
    lane, split, dim = tl.arange(0, BLOCK_M), tl.arange(0, SPLITS), tl.arange(0, DIM)
    head = first_head + lane
    real = lane < LAYER.groups
    parts = tl.load(
        lse + (head * SPLITS)[:, None] + split[None, :], real[:, None] & (split < used)[None, :],
        other=float("-inf"), cache_modifier=".cg",
    )  # fmt: skip
    peak = tl.max(parts, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(parts - peak[:, None]), 1)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for first in range(0, used, TOGETHER):
        some = first + tl.arange(0, TOGETHER)
        place = (head * SPLITS)[:, None] + some[None, :]
        there = real[:, None] & (some < used)[None, :]
        weight = tl.exp2(tl.load(lse + place, there, other=float("-inf"), cache_modifier=".cg") - peak[:, None])
        value = tl.load(
            partial + place[:, :, None] * HEAD_DIM + dim[None, None, :],
            (weight != 0.0)[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(value * weight[:, :, None], 1)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if whole_lse is not None:
        tl.store(whole_lse + head, log_sum(peak, total), real)
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + head[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), within)


# What must not be specialised stands alone: Triton would specialise it in a tuple.
@triton.jit(
    do_not_specialize=["ordered", "min_span", "num_tiles", "prefix_splits_most", "prefix_programs"],
    do_not_specialize_on_alignment=["prefix_lens", "tile_lens"],
)
def _decode_attention_kernel(
    out, parts, tokens, cache, scales, rows, scores, ordered, min_span,
    prefix_lens, tile_lens, num_tiles, prefix_splits_most, prefix_programs,
    LAYER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITTING: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: the token of a row, the heads of one KV head, one split of the keys."""
    GROUPS: tl.constexpr = LAYER.groups
    HEAD_DIM: tl.constexpr = LAYER.head_dim
    DIM: tl.constexpr = LAYER.dim
    partial, lse, arrivals, whole_lse = parts
    await_previous(CHAINED, LONG=True)
    # what lies side by side in memory is read at about the same time
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if ordered:
        row = tl.load(rows.order + row)
    lane, dim = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    head = kv_head * GROUPS + lane
    real = lane < GROUPS
    within = real[:, None] & (dim < HEAD_DIM)[None, :]
    where = row.to(tl.int64) * (tl.num_programs(1) * GROUPS) + head
    seq_len = held(tl.load(rows.seq_lens + row), LAYER)
    if seq_len == 0:  # padding owns no key, nor has a short row one on each rank
        if split == 0:
            if whole_lse is not None:
                tl.store(whole_lse + where, tl.zeros([BLOCK_M], tl.float32) + float("-inf"), real)
            tl.store(out + where[:, None] * HEAD_DIM + dim[None, :], tl.zeros([BLOCK_M, DIM], out.dtype.element_ty), within)  # fmt: skip  # noqa: E501
        return
    queries = tl.load(
        tokens.query + row.to(tl.int64) * tokens.stride_query + (head * HEAD_DIM)[:, None] + dim[None, :],
        within,
        other=0.0,
    )
    first_key = 0
    if LAYER.window > 0:
        first_key = tl.maximum(seq_len - LAYER.window, 0)
    before = 0  # parts that the shared prefix left
    if prefix_lens is not None:
        first_key = tl.load(prefix_lens + row) // PREFIX_ALIGN * PREFIX_ALIGN
        splits = prefix_splits(tile_lens, num_tiles, prefix_programs, prefix_splits_most)
        before = tl.cdiv(first_key, prefix_span(first_key, splits))
    low = first_key // BLOCK_N * BLOCK_N
    high = seq_len
    used = 1
    if SPLITTING.split:
        length = seq_len - low
        span = own_span(length, tl.num_programs(0), min_span, BLOCK_N)
        used = tl.cdiv(length, span)
        if split >= used:
            return
        low += split * span
        high = tl.minimum(low + span, seq_len)
    cache = at_head(cache, kv_head)
    if high == seq_len:  # this split reads the new token, so it stores it first
        slot = own_slot(tl.load(rows.slots + row), LAYER.ranks, LAYER.rank)
        if slot >= 0:
            place = (slot // LAYER.block_size) * cache.stride_block + (slot % LAYER.block_size) * cache.stride_token
            token = row.to(tl.int64)
            _store_token(
                cache, tokens.key + token * tokens.stride_key + kv_head * HEAD_DIM,
                tokens.value + token * tokens.stride_value + kv_head * HEAD_DIM, place, dim,
                inverses_of(scales, kv_head, True), LAYER,
            )  # fmt: skip
        tl.debug_barrier()
    full = low
    if LAYER.window == 0:
        full = tl.maximum(high // BLOCK_N * BLOCK_N, low)
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if scores.alibi_slopes is not None:
        slopes = tl.load(scores.alibi_slopes + head, real, other=0.0).to(tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if scores.sinks is not None:
        sink = tl.load(scores.sinks + head, real, other=0.0).to(tl.float32) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, total + 1.0, total)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    table = rows.block_table + row.to(tl.int64) * rows.stride_table
    query_pos = tl.zeros([BLOCK_M], tl.int32) + (seq_len - 1)
    scale, value_scale = scales_of(scores, kv_head)
    for at in range(low, full, BLOCK_N):
        acc, peak, total = attend_keys(
            acc, peak, total, queries, query_pos, at, first_key, seq_len, cache, table, scores, scale, slopes,
            LAYER, BLOCK_N, False,
        )  # fmt: skip
    for at in range(full, high, BLOCK_N):
        acc, peak, total = attend_keys(
            acc, peak, total, queries, query_pos, at, first_key, high, cache, table, scores, scale, slopes,
            LAYER, BLOCK_N, True,
        )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None] * value_scale
    if used + before == 1:
        if whole_lse is not None:
            tl.store(whole_lse + where, tl.where(empty, float("-inf"), log_sum(peak, total)), real)
        tl.store(out + where[:, None] * HEAD_DIM + dim[None, :], acc.to(out.dtype.element_ty), within)
        return
    part = where * SPLITTING.parts + before + split
    tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], acc, within & ~empty[:, None])
    tl.store(lse + part, tl.where(empty, float("-inf"), peak + tl.log2(total)), real)
    tl.debug_barrier()
    arrival = arrivals + row * tl.num_programs(1) + kv_head
    if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
        tl.store(arrival, 0)  # for the next launch
        first_head = row.to(tl.int64) * (tl.num_programs(1) * GROUPS) + kv_head * GROUPS
        _join(out, whole_lse, partial, lse, first_head, before + used, LAYER, BLOCK_M, SPLITTING)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    out: Tensor,
    launch: DecodeLaunch,
    arrivals: Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    prefix: PrefixParts | None = None,
    order: Tensor | None = None,
    whole_lse: Tensor | None = None,
    share: tuple[int, int] = (1, 0),
) -> Tensor:
    """`write_kv` and `paged_attention` for rows of which each owns one token, row i the token i; fills `out` [B, H, D].

    `arrivals` int32 [at least B · kv_heads] is all zero before and after; launches that share it must not overlap.
    Rows with seq_lens 0 store nothing and are zero. With `prefix` (and no window) a row's first tokens are not read.
    Float32 `whole_lse` [B, H] is filled with log-sum-exps, -inf for rows without keys; `share` is as for `write_kv`.
    Programs go through the rows as int32 `order` [B] lists them, each once; see `longest_first`.
    """
    num_rows, num_heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    if num_rows == 0:
        return out
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    key, value = dense_heads(key), dense_heads(value)
    layer = layer_of(query, kv_cache, window, share)
    partial = lse = out
    prefix_lens = tile_lens = None
    num_tiles = most = programs = 1
    parts = 1 if launch.splits == 1 else max(16, room_for(launch.splits))
    if prefix is not None:
        partial, lse, parts = prefix.out, prefix.lse, prefix.lse.shape[2]
        prefix_lens, tile_lens, num_tiles = prefix.row_lens, prefix.tile_lens, len(prefix.tile_lens)
        most, programs = prefix.splits, prefix.programs
    elif launch.splits > 1:
        shape = (num_rows, num_heads, parts)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    # parts that are joined at once, as many as registers hold: of 16 heads of 128 two warps hold four
    together = min(4, 8192 // (launch.block_m * layer.dim)) // (2 if launch.num_warps == 1 else 1)
    _decode_attention_kernel[(launch.splits, kv_heads, num_rows)](
        out, (partial, lse, arrivals, whole_lse),
        Projected(query, key, value, query.stride(0), key.stride(0), value.stride(0)), paged_cache(kv_cache),
        cache_scales(key_scale, value_scale),
        Rows(slot_mapping, seq_lens, block_table, block_table.stride(0), seq_lens if order is None else order),
        scores_of(scale, soft_cap, sinks, alibi_slopes, key_scale, value_scale),
        int(order is not None), launch.min_span, prefix_lens, tile_lens, num_tiles, most, programs,
        LAYER=layer, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        SPLITTING=Splitting(launch.splits > 1, parts, min(parts, max(1, together))),
        num_warps=launch.num_warps, num_stages=launch.num_stages, **chained(query.device),
    )  # fmt: skip
    return out
