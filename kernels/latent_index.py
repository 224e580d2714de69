"""The index of sparse latent attention in Triton: scores of all tokens, and the best of them; see `ReferenceIndex`.

A pair of tokens scores Σ_h w_h · relu(scale · q_h · k), where all heads share a key (DeepSeek-AI 2025). The best are
found without sorting: four passes over a row's scores count the bytes of their bits, which gives the least of the best
(radix selection), and a fifth lists the positions in order, of equal scores the first ones. Only a token's own scores
are read, however long the longest row of the step is, and no sum depends on other tokens: the list has the same bits in
any batch. Knows no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .latent_decode import LatentRows

#: Steps whose loads are under way at once, and scores that a step of a search looks at.
_STAGES = tl.constexpr(2)
_LOOKED_AT, _WARPS = 4096, 8
#: A part of a row of fewer keys costs more to begin than it saves.
_MIN_PART = 512
#: Rows of scores are of a multiple of so many, so that each begins at a multiple of 16 bytes.
_ROUND = 128
#: Programs for each multiprocessor that a launch of scores aims at.
_EACH = 4


class IndexSizes(NamedTuple):
    """What kernels are compiled for: heads and numbers of a key, both also padded, and tokens of a block."""

    heads: int
    dim: int
    padded_heads: int
    padded_dim: int
    block_size: int


@dataclass(frozen=True)
class ScoreLaunch:
    """Keys of a tile, the parts that a row is read in, and a program's pipeline."""

    block_n: int
    parts: int
    num_warps: int
    num_stages: int


def launch_for(num_tokens: int, longest: int, multiprocessors: int, dtype: torch.dtype) -> ScoreLaunch:
    """The sizes for so many tokens, the last of which sees up to `longest` others. No score depends on the parts."""
    parts = max(1, min(longest // _MIN_PART, _EACH * multiprocessors // max(1, num_tokens)))
    return ScoreLaunch(16, parts, 8, 1) if dtype.itemsize > 2 else ScoreLaunch(128, parts, 4, 3)


@triton.jit
def _index_scores(
    scores, query, weights, cache, rows, top_k, scale, stride_scores, stride_query, stride_head, stride_weights,
    stride_block, stride_token,
    SIZES: tl.constexpr, BLOCK_N: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: the scores of a part of what a token sees; none where all of that is chosen."""
    await_previous(CHAINED, LONG=True)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = tl.load(rows.seq_lens + token)
    if seen <= top_k:
        return
    span = tl.cdiv(tl.cdiv(seen, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    low = part * span
    high = tl.minimum(low + span, seen)
    head, lane = tl.arange(0, SIZES.padded_heads), tl.arange(0, SIZES.padded_dim)
    real, in_dim = head < SIZES.heads, lane < SIZES.dim
    source = query + token * stride_query + (head * stride_head)[:, None] + lane[None, :]
    small = tl.load(source, real[:, None] & in_dim[None, :], other=0.0)
    weight = tl.load(weights + token * stride_weights + head, real, other=0.0).to(tl.float32)
    table = rows.block_table + tl.load(rows.table_rows + token).to(tl.int64) * rows.stride_table
    for at in range(low, high, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        there = position < high
        block = tl.load(table + position // SIZES.block_size, there, other=0)
        place = block.to(tl.int64) * stride_block + (position % SIZES.block_size) * stride_token
        within = there[:, None]
        if SIZES.dim != SIZES.padded_dim:
            within = within & in_dim[None, :]
        keys = tl.load(cache + place[:, None] + lane[None, :], within, other=0.0)
        products = tl.dot(keys, tl.trans(small), input_precision="ieee") * scale
        found = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(scores + token * stride_scores + position, found, there)


@triton.jit
def _keys_of(row, position, inside):
    """uint32 in the order of the scores at `position`; equal for equal scores."""
    x = tl.load(row + position, inside, other=0.0)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)  # both zeros are the same score
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit
def _best_listed(row, target, seen, top_k, BLOCK: tl.constexpr):
    """Writes the positions of the `top_k` best of the first `seen` scores of a row, in order; there are more."""
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    bound, known = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)  # `known` bits of it are found
    missing, shift = top_k, 24
    while shift >= 0:
        counts = tl.zeros([256], tl.int32)
        for at in tl.range(0, seen, BLOCK, num_stages=_STAGES):
            position = at + lane
            inside = position < seen
            key = _keys_of(row, position, inside)
            inside = inside & ((key & known) == bound)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, inside)
        reached = tl.cumsum(counts, 0, reverse=True)  # with this digit or a higher one
        digit = tl.sum((reached >= missing).to(tl.int32), 0) - 1
        missing -= tl.sum(tl.where(digits == digit, reached - counts, 0), 0)
        bound = bound | (digit.to(tl.uint32) << shift)
        known = known | (tl.full([], 255, tl.uint32) << shift)
        shift -= 8
    taken = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for at in tl.range(0, seen, BLOCK, num_stages=_STAGES):
        position = at + lane
        inside = position < seen
        key = _keys_of(row, position, inside)
        same = (inside & (key == bound)).to(tl.int32)
        first = equal + tl.cumsum(same, 0) <= missing  # so many of the least of the best are still to be taken
        takes = (inside & ((key > bound) | ((same > 0) & first))).to(tl.int32)
        tl.store(target + taken + tl.cumsum(takes, 0) - 1, position, takes > 0)
        taken += tl.sum(takes, 0)
        equal += tl.sum(same, 0)


@triton.jit
def _choose_best(chosen, scores, seq_lens, top_k, stride_scores, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One program: the list of a token; all that it sees, and -1, where that is no more than a list holds."""
    await_previous(CHAINED, LONG=True)
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(seq_lens + token)
    target = chosen + token * top_k
    if seen <= top_k:
        for at in range(0, top_k, BLOCK):
            entry = at + tl.arange(0, BLOCK)
            tl.store(target + entry, tl.where(entry < seen, entry, -1), entry < top_k)
    else:
        _best_listed(scores + token * stride_scores, target, seen, top_k, BLOCK)


def index_sizes(num_heads: int, kv_cache: Tensor) -> IndexSizes:
    """The sizes of an index with such keys [blocks, block_size, D]."""
    dim = kv_cache.shape[2]
    padded = max(16, triton.next_power_of_2(num_heads)), max(16, triton.next_power_of_2(dim))
    return IndexSizes(num_heads, dim, *padded, kv_cache.shape[1])


def index_scores(
    query: Tensor,
    weights: Tensor,
    kv_cache: Tensor,
    table_rows: Tensor,
    seen: Tensor,
    block_table: Tensor,
    *,
    top_k: int,
    longest: int,
    scale: float,
    launch: ScoreLaunch,
) -> Tensor:
    """float32 [N, `longest` or more]: what token i scores with the first seen[i] of its row, and anything behind.

    `query` [N, H, D], `weights` [N, H], the cache [blocks, block_size, D]; token i is in row table_rows[i] of
    `block_table`. None sees more than `longest`. Tokens that see no more than `top_k` are not scored.
    """
    width = triton.cdiv(longest, _ROUND) * _ROUND
    scores = torch.empty((len(query), width), dtype=torch.float32, device=query.device)
    if len(query):
        _index_scores[(len(query), launch.parts)](
            scores, query, weights, kv_cache, LatentRows(seen, table_rows, block_table, block_table.stride(0)), top_k,
            scale, scores.stride(0), query.stride(0), query.stride(1), weights.stride(0), kv_cache.stride(0),
            kv_cache.stride(1),
            SIZES=index_sizes(query.shape[1], kv_cache), BLOCK_N=launch.block_n,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **chained(query.device),
        )  # fmt: skip
    return scores


def choose_best(scores: Tensor, seen: Tensor, chosen: Tensor) -> None:
    """Fills `chosen` int32 [N, top_k] with the positions of the best of the first seen[i] of scores[i], in order.

    Where there are no more than top_k, these are all of them, and then -1, and the scores are not read; of equal scores
    the first ones are taken.
    """
    if len(chosen):
        _choose_best[(len(chosen),)](
            chosen, scores, seen, chosen.shape[1], scores.stride(0), BLOCK=_LOOKED_AT, num_warps=_WARPS,
            **chained(chosen.device),
        )  # fmt: skip
