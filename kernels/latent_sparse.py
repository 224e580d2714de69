"""Latent attention of tokens to the few others that an index chose, in Triton; its plain twin is `ReferenceLatent`.

Every token of a step is a row of its own, in absorbed form: all heads multiply the latents of its list, which are
gathered from the paged cache, with scores scale · q · [c; k] and the sum of c weighed by their softmax (DeepSeek-AI
2025). A token that sees no more others than a list holds attends to all of them, and its list is not read. A list may
be read in parts at once, which are joined as in `latent_decode`. Softmax runs in base 2. Knows no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import LOG2E
from .chain import await_previous, chained
from .latent_decode import LatentLaunch, LatentRows, join_parts, latents_of, part_of_row, room_for_parts

#: Tokens whose rows one program finds.
_FOUND = 128


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _token_rows(table_rows, seen, query_start, seq_lens, num_rows, num_tokens, FOUND: tl.constexpr):
    """One program: of some tokens the row, and how many tokens of that row each sees; none behind the last row."""
    token = tl.program_id(0) * FOUND + tl.arange(0, FOUND)
    left = tl.zeros([FOUND], tl.int32)
    right = left + num_rows
    while tl.max(right - left, 0) > 0:
        middle = (left + right) // 2
        searching = left < right
        behind = searching & (tl.load(query_start + middle + 1, searching, other=0) <= token)
        left = tl.where(behind, middle + 1, left)
        right = tl.where(searching & (behind == 0), middle, right)
    there = left < num_rows
    row = tl.where(there, left, 0)
    end = tl.load(query_start + row + 1)
    length = tl.load(seq_lens + row) - (end - 1 - token)
    stored = token < num_tokens
    tl.store(table_rows + token, row, stored)
    tl.store(seen + token, tl.where(there, tl.maximum(length, 0), 0), stored)


@triton.jit
def _chosen_tile(
    acc, peak, total, query, query_rope, at, high, dense, seen, mine, cache, table, scale, stride_block, stride_token,
    SIZES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Entries [at, high) of the list `mine`, or with `dense` the tokens at these positions: updates (acc, peak, total).

    Entries that are -1, or not seen, are left out; a tile may hold nothing else.
    """
    entry = at + tl.arange(0, BLOCK_N)
    there = entry < high
    position = tl.where(dense, entry, tl.load(mine + entry, there & (dense == 0), other=-1))
    there = there & (position >= 0) & (position < seen)
    position = tl.where(there, position, 0)
    block = tl.load(table + position // SIZES.block_size, there, other=0)
    place = block.to(tl.int64) * stride_block + (position % SIZES.block_size) * stride_token
    wide = tl.arange(0, SIZES.padded_rank)
    within = there[:, None]
    if SIZES.rank != SIZES.padded_rank:
        within = within & (wide < SIZES.rank)[None, :]
    latents = tl.load(cache + place[:, None] + wide[None, :], within, other=0.0)
    scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
    if SIZES.rope > 0:
        narrow = tl.arange(0, SIZES.padded_rope)
        turned = tl.load(
            cache + place[:, None] + (SIZES.rank + narrow)[None, :],
            there[:, None] & (narrow < SIZES.rope)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query_rope, tl.trans(turned), scores, input_precision="ieee")
    scores = tl.where(there[None, :], scores * scale, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(peak - base)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(latents.dtype), latents, acc * shrunk[:, None], input_precision="ieee")
    return acc, highest, total


@triton.jit
def _latent_sparse(
    out, lse, query, cache, rows, chosen, stride_chosen, top_k, scale, stride_query, stride_head, stride_block,
    stride_token,
    SIZES: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some heads of a token, one part of its list; all of it unless SPLIT."""
    RANK: tl.constexpr = SIZES.padded_rank
    await_previous(CHAINED, LONG=True)
    split, group, token = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seen = tl.load(rows.seq_lens + token)
    dense = seen <= top_k
    low, high = part_of_row(tl.minimum(seen, top_k), split, tl.num_programs(0), BLOCK_N)
    head = group * BLOCK_H + tl.arange(0, BLOCK_H)
    real = head < HEADS
    wide, narrow = tl.arange(0, SIZES.padded_rank), tl.arange(0, SIZES.padded_rope)
    within = real[:, None] & (wide < SIZES.rank)[None, :]
    source = query + token * stride_query + (head * stride_head)[:, None]
    of_rank = tl.load(source + wide[None, :], within, other=0.0)
    of_rope = of_rank
    if SIZES.rope > 0:
        of_rope = tl.load(
            source + (SIZES.rank + narrow)[None, :], real[:, None] & (narrow < SIZES.rope)[None, :], other=0.0
        )
    table = rows.block_table + tl.load(rows.table_rows + token).to(tl.int64) * rows.stride_table
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, RANK], tl.float32)
    for at in range(low, high, BLOCK_N):
        acc, peak, total = _chosen_tile(
            acc, peak, total, of_rank, of_rope, at, high, dense, seen, chosen + token * stride_chosen, cache, table,
            scale, stride_block, stride_token, SIZES, BLOCK_N,
        )  # fmt: skip
    whole = tl.where(total == 0.0, 1.0, total)  # nothing was seen: zeros, which weigh nothing
    part = (token * HEADS + head) * tl.num_programs(0) + split
    acc = acc / whole[:, None]
    tl.store(out + part[:, None] * SIZES.rank + wide[None, :], acc.to(out.dtype.element_ty), within)
    if SPLIT:
        tl.store(lse + part, tl.where(total == 0.0, float("-inf"), peak + tl.log2(whole)), real)


def token_rows(query_start: Tensor, seq_lens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """int32 [T] each: the row of every token of a step, and how many of its row's tokens it sees, itself too.

    Row i owns tokens query_start[i] .. query_start[i + 1] and has seq_lens[i] tokens with them, int32. Tokens behind
    the last row, and of rows without a length, see none.
    """
    table_rows, seen = (torch.empty(num_tokens, dtype=torch.int32, device=query_start.device) for _ in range(2))
    if num_tokens:
        _token_rows[(triton.cdiv(num_tokens, _FOUND),)](
            table_rows, seen, query_start, seq_lens, len(seq_lens), num_tokens, FOUND=_FOUND, num_warps=4
        )
    return table_rows, seen


def latent_sparse(
    query: Tensor,
    kv_cache: Tensor,
    table_rows: Tensor,
    seen: Tensor,
    block_table: Tensor,
    chosen: Tensor,
    *,
    rank: int,
    scale: float,
    launch: LatentLaunch,
) -> Tensor:
    """Sums of latents [N, H, rank] for absorbed queries `query` [N, H, rank + rope].

    Query i sees the first seen[i] tokens of row table_rows[i] of `block_table`, all int32; of these it attends to the
    positions chosen[i] (int32 [N, top_k], each once, -1 for none), or to all where there are no more than top_k. Zeros
    where it sees none. The cache [blocks, block_size, rank + rope] holds them all.
    """
    count, heads, _ = query.shape
    out = torch.empty((count, heads, rank), dtype=query.dtype, device=query.device)
    if count == 0:
        return out
    splits = launch.splits
    parts, lse = room_for_parts(out, splits)
    sizes = latents_of(kv_cache[..., :rank], kv_cache[..., rank:])
    _latent_sparse[(splits, triton.cdiv(heads, launch.block_h), count)](
        parts, lse, query, kv_cache, LatentRows(seen, table_rows, block_table, block_table.stride(0)), chosen,
        chosen.stride(0), chosen.shape[1], scale * LOG2E.value, query.stride(0), query.stride(1), kv_cache.stride(0),
        kv_cache.stride(1),
        SIZES=sizes, HEADS=heads, BLOCK_H=launch.block_h, BLOCK_N=launch.block_n, SPLIT=splits > 1,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **chained(query.device),
    )  # fmt: skip
    if splits > 1:
        join_parts(out, parts, lse, sizes)
    return out
