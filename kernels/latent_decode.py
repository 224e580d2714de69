"""Latent attention of single tokens over a paged cache of latents, in Triton; its plain twin is `ReferenceLatent`.

All heads of a row multiply the same latents: scores are scale · q · [c; k], and the output is the sum of c weighed by
their softmax, so that a latent is read once for the scores and the sum (DeepSeek-AI 2024, absorbed form). A row is read
in parts at once, each of which leaves a sum and its log-sum-exp (flash decoding, Dao et al. 2023), and a second kernel
joins them. Softmax runs in base 2. Knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import LOG2E, to_cache
from .chain import await_previous, chained
from .paged import limit_of

#: The most parts that a row is read in by other kernels than that of few heads, and the most that can be joined.
MAX_PARTS, MOST_JOINED = 64, 128


class Latents(NamedTuple):
    """What kernels are compiled for: the sizes of a latent's two parts, also as powers of two, and of a block.

    `limit` is the largest number of a first part of 8-bit floats, 0 for others.
    """

    rank: int
    rope: int
    padded_rank: int
    padded_rope: int
    block_size: int
    limit: float


class LatentCache(NamedTuple):
    """Latents' two parts, each [blocks, block size, numbers]; strides in its own elements, that of numbers is 1."""

    first: Any
    turned: Any
    stride_block: Any
    stride_token: Any
    stride_turned_block: Any
    stride_turned_token: Any


class LatentRows(NamedTuple):
    """Rows [N] of one query each: how many tokens it sees, and which row of the block table they are in."""

    seq_lens: Any
    table_rows: Any
    block_table: Any
    stride_table: Any


@dataclass(frozen=True)
class LatentLaunch:
    """Sizes of a launch: heads and latents of a tile, and the most parts that a row is read in."""

    block_h: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def launch_for(num_heads: int, dtype: torch.dtype, splits: int = 1) -> LatentLaunch:
    """The sizes that suit so many heads; `splits` is a power of two."""
    block_h = min(64, max(16, triton.next_power_of_2(num_heads)))
    if dtype.itemsize > 2:  # products of float32 are sums in registers
        return LatentLaunch(16, 16, splits, 8, 1)
    if block_h == 16:
        return LatentLaunch(16, 32, splits, 4, 5 if _is_hopper() else 2)
    if block_h == 32:
        return LatentLaunch(32, 32, splits, 8, 2)
    return LatentLaunch(64, 64, splits, 8, 2) if _is_hopper() else LatentLaunch(64, 32, splits, 8, 2)


def _is_hopper() -> bool:
    """Whether the device has the shared memory of Hopper and later chips."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def part_of_row(seq_len, split, splits, BLOCK_N: tl.constexpr):
    """[low, high) of the tokens of a row that part `split` reads; empty for parts that a short row does not need.

    Parts differ by a tile at most, so that any number of programs shares a row.
    """
    tiles = tl.cdiv(seq_len, BLOCK_N)
    low, high = split * tiles // splits * BLOCK_N, (split + 1) * tiles // splits * BLOCK_N
    return low, tl.minimum(high, seq_len)


@triton.jit
def _store_latent(cache, latent, slot, SIZES: tl.constexpr):
    wide, narrow = tl.arange(0, SIZES.padded_rank), tl.arange(0, SIZES.padded_rope)
    block, offset = slot // SIZES.block_size, slot % SIZES.block_size
    real = wide < SIZES.rank
    first = to_cache(tl.load(latent + wide, real, other=0.0), 1.0, cache.first.dtype.element_ty, SIZES.limit)
    tl.store(cache.first + block * cache.stride_block + offset * cache.stride_token + wide, first, real)
    if SIZES.rope > 0:
        there = narrow < SIZES.rope
        turned = tl.load(latent + SIZES.rank + narrow, there, other=0.0).to(cache.turned.dtype.element_ty)
        place = block * cache.stride_turned_block + offset * cache.stride_turned_token
        tl.store(cache.turned + place + narrow, turned, there)


# Decodes come first in a step, so the alignment of the rest depends on their number.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def _write_latents(cache, latent, slots, stride_latent, SIZES: tl.constexpr):
    """One program stores one token's latent."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    _store_latent(cache, latent + token * stride_latent, slot, SIZES)


@triton.jit
def _latent_tile(
    acc, peak, total, query, query_rope, at, high, cache, table, scale,
    SIZES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of latents from `at` on: updates (acc, peak, total). Only tokens before `high` are read."""
    position = at + tl.arange(0, BLOCK_N)
    there = position < high
    block = tl.load(table + position // SIZES.block_size, there, other=0).to(tl.int64)
    offset = position % SIZES.block_size
    place = block * cache.stride_block + offset * cache.stride_token
    wide = tl.arange(0, SIZES.padded_rank)
    within = there[:, None]
    if SIZES.rank != SIZES.padded_rank:
        within = within & (wide < SIZES.rank)[None, :]
    latents = tl.load(cache.first + place[:, None] + wide[None, :], within, other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
    if SIZES.rope > 0:
        narrow = tl.arange(0, SIZES.padded_rope)
        place = block * cache.stride_turned_block + offset * cache.stride_turned_token
        turned = tl.load(
            cache.turned + place[:, None] + narrow[None, :],
            there[:, None] & (narrow < SIZES.rope)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query_rope, tl.trans(turned), scores, input_precision="ieee")
    scores = tl.where(there[None, :], scores * scale, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrunk = tl.exp2(peak - highest)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(latents.dtype), latents, acc * shrunk[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _latent_decode(
    out, lse, query, latent, cache, slots, rows, scale, stride_query, stride_head, stride_latent,
    SIZES: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some heads of a row, one part of its tokens; all of them unless SPLIT."""
    RANK: tl.constexpr = SIZES.padded_rank
    await_previous(CHAINED, LONG=True)
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(rows.seq_lens + row)
    splits = tl.num_programs(0)
    low, high = part_of_row(seq_len, split, splits, BLOCK_N)
    head = group * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    wide, narrow = tl.arange(0, SIZES.padded_rank), tl.arange(0, SIZES.padded_rope)
    within = real[:, None] & (wide < SIZES.rank)[None, :]
    if low >= high:
        part = (row * HEADS + head) * splits + split
        if SPLIT:
            tl.store(lse + part, tl.zeros([BLOCK_H], tl.float32) + float("-inf"), real)
        else:
            zeros = tl.zeros([BLOCK_H, RANK], out.dtype.element_ty)
            tl.store(out + part[:, None] * SIZES.rank + wide[None, :], zeros, within)
        return
    if high == seq_len:  # this part reads the newest token, so it stores it first
        slot = tl.load(slots + row)
        if slot >= 0:
            _store_latent(cache, latent + row * stride_latent, slot, SIZES)
        tl.debug_barrier()
    source = query + row * stride_query + (head * stride_head)[:, None]
    of_rank = tl.load(source + wide[None, :], within, other=0.0)
    of_rope = of_rank
    if SIZES.rope > 0:
        of_rope = tl.load(
            source + (SIZES.rank + narrow)[None, :], real[:, None] & (narrow < SIZES.rope)[None, :], other=0.0
        )
    table = rows.block_table + tl.load(rows.table_rows + row).to(tl.int64) * rows.stride_table
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, RANK], tl.float32)
    for at in range(low, high, BLOCK_N):
        acc, peak, total = _latent_tile(
            acc, peak, total, of_rank, of_rope, at, high, cache, table, scale,
            SIZES, BLOCK_N,
        )  # fmt: skip
    acc = acc / total[:, None]
    part = (row * HEADS + head) * tl.num_programs(0) + split
    tl.store(out + part[:, None] * SIZES.rank + wide[None, :], acc.to(out.dtype.element_ty), within)
    if SPLIT:
        tl.store(lse + part, peak + tl.log2(total), real)


@triton.jit(do_not_specialize=["splits"])
def _join_parts(
    out, parts, lse, splits, SIZES: tl.constexpr, MOST: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some columns of a head of a row.

    out = Σ 2^(lse_i - peak) part_i / Σ 2^(lse_i - peak); zeros without any part.
    """
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    split, wide = tl.arange(0, MOST), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sizes = tl.load(lse + row * splits + split, split < splits, other=float("-inf"))
    peak = tl.max(sizes, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(sizes - base), 0)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, splits, TOGETHER):
        some = first + tl.arange(0, TOGETHER)
        weight = tl.exp2(tl.load(lse + row * splits + some, some < splits, other=float("-inf")) - base)
        value = tl.load(
            parts + (row * splits + some)[:, None] * SIZES.rank + wide[None, :],
            (weight > 0.0)[:, None] & (wide < SIZES.rank)[None, :], other=0.0,
        )  # fmt: skip
        acc += tl.sum(value * weight[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * SIZES.rank + wide, acc.to(out.dtype.element_ty), wide < SIZES.rank)


def latents_of(first: Tensor, turned: Tensor) -> Latents:
    """The sizes of a cache of [blocks, block_size, rank] and [blocks, block_size, rope]."""
    rank, rope = first.shape[2], turned.shape[2]
    padded = max(16, triton.next_power_of_2(rank)), max(16, triton.next_power_of_2(max(rope, 1)))
    return Latents(rank, rope, *padded, first.shape[1], limit_of(first))


def parts_of(kv_cache: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cached latents' first parts [blocks, block_size, rank] and turned parts [blocks, block_size, rope].

    A cache of bytes holds the first as e4m3, then the second as `dtype`; any other holds them side by side.
    """
    if kv_cache.dtype != torch.uint8:
        return kv_cache[..., :rank], kv_cache[..., rank:]
    return kv_cache[..., :rank].view(torch.float8_e4m3fn), kv_cache[..., rank:].view(dtype)


def write_latents(latent: Tensor, kv_cache: Tensor, slots: Tensor, rank: int) -> None:
    """Stores `latent` [T, rank + rope] at `slots` int64 [T] of a cache as `parts_of` reads it; -1 is not stored."""
    if len(latent):
        first, turned = parts_of(kv_cache, rank, latent.dtype)
        _write_latents[(len(latent),)](
            LatentCache(first, turned, *first.stride()[:2], *turned.stride()[:2]), latent, slots, latent.stride(0),
            SIZES=latents_of(first, turned),
        )  # fmt: skip


def latent_decode(
    query: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    table_rows: Tensor,
    block_table: Tensor,
    *,
    rank: int,
    scale: float,
    launch: LatentLaunch,
) -> Tensor:
    """Sums of latents [N, H, rank] for absorbed queries `query` [N, H, rank + rope]; zeros where `seq_lens` is 0.

    Query i sees the first seq_lens[i] tokens of row table_rows[i] of `block_table`, all int32 [N]. The cache is
    [blocks, block_size, rank + rope], or as `parts_of` reads it. The last token that query i sees, latent[i]
    [rank + rope], is stored at slots[i] (int64) first, unless that is -1: then the cache holds it.
    """
    count, heads, _ = query.shape
    shape = (count, heads, rank)
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if count == 0:
        return out
    splits = launch.splits
    parts, lse = room_for_parts(out, splits)
    first, turned = parts_of(kv_cache, rank, query.dtype)
    sizes = latents_of(first, turned)
    _latent_decode[(splits, triton.cdiv(heads, launch.block_h), count)](
        parts, lse, query, latent, LatentCache(first, turned, *first.stride()[:2], *turned.stride()[:2]), slots,
        LatentRows(seq_lens, table_rows, block_table, block_table.stride(0)), scale * LOG2E.value,
        query.stride(0), query.stride(1), latent.stride(0),
        SIZES=sizes, HEADS=heads, BLOCK_H=launch.block_h, BLOCK_N=launch.block_n, SPLIT=splits > 1,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **chained(query.device),
    )  # fmt: skip
    if splits > 1:
        join_parts(out, parts, lse, sizes)
    return out


def room_for_parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Room for `join_parts`: sums float32 [N, H, splits, rank], log-sum-exps [N, H, splits]; `out` where it is one."""
    if splits == 1:
        return out, out
    (count, heads, rank), device = out.shape, out.device
    return (
        torch.empty((count, heads, splits, rank), dtype=torch.float32, device=device),
        torch.empty((count, heads, splits), dtype=torch.float32, device=device),
    )


def join_parts(out: Tensor, parts: Tensor, lse: Tensor, sizes: Latents) -> None:
    """Fills `out` [N, H, rank] from `parts` float32 [N, H, splits, rank] and `lse` [N, H, splits] in base 2."""
    count, heads, splits = lse.shape
    # few parts in whole, many in quarters: reads of one round are on their way at once, those of the next one wait
    together, columns = (4, sizes.padded_rank) if splits <= 4 else (16, min(128, sizes.padded_rank))
    _join_parts[(count * heads, sizes.padded_rank // columns)](
        out, parts, lse, splits, SIZES=sizes, MOST=MOST_JOINED, TOGETHER=together, COLUMNS=columns, num_warps=2,
        **chained(out.device),
    )  # fmt: skip
