"""Paged attention for a few rows of one token each, in Triton: what waits for nothing is read before the kernel begins.

A step of one request has few programs here, and what they take is not bytes but one access after another. So a program
lets the next kernel in at once, reads lengths, the block table and its first keys and values, which steps before this
one wrote, while the kernels before it still run, and only then waits for the query and the new token. The new token
takes part from registers: nobody waits for it to come back from the cache. `frame.kernels.decode` serves the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention import LOG2E, at_head, dense_heads
from .chain import chained
from .decode import room_for
from .paged import Projected, Rows, Splitting, layer_of, paged_cache, scores_of

#: Parts of a row that are joined at once.
TOGETHER = 4


@dataclass(frozen=True)
class FewLaunch:
    """Sizes of one launch: keys of a tile, most splits of a row's keys, none of them shorter than `min_span` keys.

    With `early` a program reads keys of steps before this one before it waits for the kernels before it. The caller
    then promises that a kernel which is not chained lies between this one and all that wrote `seq_lens`,
    `slot_mapping`, `block_table` or earlier tokens' keys and values. `lets_in`: the next kernel may begin before this
    one has waited.
    """

    block_n: int
    num_warps: int
    splits: int = 1
    min_span: int = 0
    early: bool = True
    lets_in: bool = True


def fits(head_dim: int, groups: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether the kernel serves such heads; it knows no ALiBi, soft cap, shared prefix or share of a context."""
    return dtype == kv_dtype and dtype.itemsize == 2 and head_dim <= 128 and groups <= 16


@triton.jit
def _tile(cache, table, start, end, newest, LAYER: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys and values at positions from `start` on; what is at `end` and behind it or at `newest` is zeros."""
    position, dim = start + tl.arange(0, BLOCK_N), tl.arange(0, LAYER.dim)
    known = (position < end) & (position != newest)
    block = tl.load(table + position // LAYER.block_size, mask=known, other=0)
    place = block.to(tl.int64) * cache.stride_block + (position % LAYER.block_size) * cache.stride_token
    readable = known[:, None] & (dim < LAYER.head_dim)[None, :]
    key = tl.load(cache.key + place[:, None] + dim[None, :], mask=readable, other=0.0)
    value = tl.load(cache.value + place[:, None] + dim[None, :], mask=readable, other=0.0)
    return key, value


@triton.jit
def _join_few(
    out, partial, lse, first_head, used,
    LAYER: tl.constexpr, HEADS: tl.constexpr, ROOM: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The first `used` parts as one; values are read beside their weights, not after them."""
    DIM: tl.constexpr = LAYER.dim
    lane, dim = tl.arange(0, HEADS), tl.arange(0, DIM)
    head, real, within = first_head + lane, lane < LAYER.groups, dim < LAYER.head_dim
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    for first in range(0, used, TOGETHER):
        some = first + tl.arange(0, TOGETHER)
        place = (head * ROOM)[:, None] + some[None, :]
        there = real[:, None] & (some < used)[None, :]
        part = tl.load(lse + place, there, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            partial + place[:, :, None] * LAYER.head_dim + dim[None, None, :],
            there[:, :, None] & within[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(part, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, weight = tl.exp2(peak - base), tl.exp2(part - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.sum(value * weight[:, :, None], 1)
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + head[:, None] * LAYER.head_dim + dim[None, :],
        acc.to(out.dtype.element_ty),
        real[:, None] & within[None, :],
    )


# `early` differs between a step that is tried before its capture and the capture, in which nothing may be compiled.
@triton.jit(do_not_specialize=["min_span", "early"])
def _few_decodes(
    out, parts, tokens, cache, rows, scores, min_span, early,
    LAYER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr, SPLITTING: tl.constexpr,
    LETS_IN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: the token of a row, the heads of one KV head, one split of the keys."""
    DIM: tl.constexpr = LAYER.dim
    if CHAINED and LETS_IN:
        gdc_launch_dependents()
    if CHAINED:
        if early == 0:
            gdc_wait()
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(rows.seq_lens + row)
    low = 0
    if LAYER.window > 0:
        low = tl.maximum(seq_len - LAYER.window, 0)
    high = seq_len
    used = 1
    if SPLITTING.split:
        length = tl.maximum(seq_len - low, 1)
        span = tl.maximum(tl.cdiv(length, tl.num_programs(0)), min_span)
        span = tl.cdiv(span, BLOCK_N) * BLOCK_N
        used = tl.cdiv(length, span)
        if split >= used:  # the first split of a row waits, so that this kernel does not end before the one before it
            return
        low += split * span
        high = tl.minimum(low + span, high)
    cache = at_head(cache, kv_head)
    table = rows.block_table + row.to(tl.int64) * rows.stride_table
    key, value = _tile(cache, table, low, high, seq_len - 1, LAYER, BLOCK_N)
    next_key, next_value = _tile(cache, table, low + BLOCK_N, high, seq_len - 1, LAYER, BLOCK_N)
    slot = tl.load(rows.slots + row)
    lane, dim = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    head = kv_head * LAYER.groups + lane
    real, there = lane < LAYER.groups, dim < LAYER.head_dim
    within = real[:, None] & there[None, :]
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if scores.sinks is not None:
        sink = tl.load(scores.sinks + head, real & (split == 0), other=float("-inf")).to(tl.float32) * LOG2E
    if CHAINED:
        gdc_wait()  # at once where the program has waited
    if CHAINED and not LETS_IN:
        gdc_launch_dependents()
    token = row.to(tl.int64)
    queries = tl.load(
        tokens.query + token * tokens.stride_query + (head * LAYER.head_dim)[:, None] + dim[None, :], within, other=0.0
    )
    key_base = tokens.key + token * tokens.stride_key + kv_head * LAYER.head_dim
    value_base = tokens.value + token * tokens.stride_value + kv_head * LAYER.head_dim
    own_key = tl.load(key_base + dim[None, :], there[None, :], other=0.0)
    own_value = tl.load(value_base + dim[None, :], there[None, :], other=0.0)
    if (split == used - 1) & (slot >= 0):
        place = (slot // LAYER.block_size) * cache.stride_block + (slot % LAYER.block_size) * cache.stride_token
        tl.store(cache.key + place + dim[None, :], own_key, there[None, :])
        tl.store(cache.value + place + dim[None, :], own_value, there[None, :])
    factor = scores.scale * LOG2E  # of a score, for softmax in base 2
    peak = sink
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for at in range(low, high, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        newest = (position == seq_len - 1)[:, None]
        key = tl.where(newest, own_key, key)
        value = tl.where(newest, own_value, value)
        score = tl.dot(queries, tl.trans(key), input_precision="ieee")
        score = tl.where((position < high)[None, :], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * factor)  # a number, since the tile has a key
        shrink = tl.exp2(peak - new_peak)[:, None]
        weight = tl.exp2(tl.fma(score, factor, -new_peak[:, None]))
        weights = weights * shrink + weight
        acc = tl.dot(weight.to(queries.dtype), value, acc * shrink, input_precision="ieee")
        key, value, peak = next_key, next_value, new_peak
        next_key, next_value = _tile(cache, table, at + 2 * BLOCK_N, high, seq_len - 1, LAYER, BLOCK_N)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # padding has no key
    total = tl.sum(weights, 1) + tl.exp2(sink - base)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    where = token * (tl.num_programs(1) * LAYER.groups) + head
    if used == 1:
        tl.store(out + where[:, None] * LAYER.head_dim + dim[None, :], acc.to(out.dtype.element_ty), within)
        return
    if SPLITTING.split:
        partial, lse, arrivals = parts
        part = where * SPLITTING.parts + split
        tl.store(partial + part[:, None] * LAYER.head_dim + dim[None, :], acc, within)
        tl.store(lse + part, peak + tl.log2(total), real)
        tl.debug_barrier()
        arrival = arrivals + row * tl.num_programs(1) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            tl.store(arrival, 0)  # for the next launch
            first_head = token * (tl.num_programs(1) * LAYER.groups) + kv_head * LAYER.groups
            _join_few(out, partial, lse, first_head, used, LAYER, HEADS, SPLITTING.parts, SPLITTING.together)


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
    launch: FewLaunch,
    arrivals: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `decode.decode_attention`, for layers that `fits` names; see `FewLaunch` for what the caller promises."""
    num_rows, num_heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    if num_rows == 0:
        return out
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    key, value = dense_heads(key), dense_heads(value)
    layer, room = layer_of(query, kv_cache, window), 1
    partial = lse = None
    if launch.splits > 1:
        room = max(16, room_for(launch.splits))
        partial = torch.empty((num_rows, num_heads, room, head_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((num_rows, num_heads, room), dtype=torch.float32, device=query.device)
    _few_decodes[(launch.splits, kv_heads, num_rows)](
        out, (partial, lse, arrivals),
        Projected(query, key, value, query.stride(0), key.stride(0), value.stride(0)), paged_cache(kv_cache),
        Rows(slot_mapping, seq_lens, block_table, block_table.stride(0), None),
        scores_of(scale, 0.0, sinks, None, 1.0, 1.0), launch.min_span, int(launch.early),
        LAYER=layer, BLOCK_M=16, BLOCK_N=launch.block_n, HEADS=triton.next_power_of_2(layer.groups),
        SPLITTING=Splitting(launch.splits > 1, room, TOGETHER), LETS_IN=launch.lets_in,
        num_warps=launch.num_warps, num_stages=1, **chained(query.device),
    )  # fmt: skip
    return out
