"""Latent attention of prompts over expanded keys and values, in Triton: two widths, and what is there is merged.

A key of head h is [k_h; r], where r is the turned part that all heads share, so that it is not copied for each of them.
Keys of a row are one run of rows in memory. A launch may add to the result of an earlier one over other keys: both
outputs are weighed by their log-sum-exps. Softmax runs in base 2. Knows no cache and no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import LOG2E


class Expanded(NamedTuple):
    """Keys [S, H, nope], turned keys [S, rope] and values [S, H, value]; strides in elements, the last axis dense."""

    key: Any
    turned: Any
    value: Any
    stride_key: Any
    stride_key_head: Any
    stride_turned: Any
    stride_value: Any
    stride_value_head: Any


class Widths(NamedTuple):
    """Numbers of a head's key, of the turned part and of a value (`out`), each padded to a power of two as well."""

    nope: int
    rope: int
    out: int
    padded_nope: int
    padded_rope: int
    padded_value: int


@dataclass(frozen=True)
class PrefillLaunch:
    """Queries and keys of a tile, and its pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def launch_for(widths: Widths, dtype: torch.dtype) -> PrefillLaunch:
    """The sizes that suit a layer."""
    if dtype.itemsize > 2:
        return PrefillLaunch(32, 16, 4, 1)
    if max(widths.padded_nope, widths.padded_value) > 128:
        return PrefillLaunch(64, 32, 8, 2)
    return PrefillLaunch(128, 64, 8, 2)


@triton.jit
def _row_of(query_start, block, num_rows, BLOCK_M: tl.constexpr):
    """The row that owns query block `block`: row i begins at block query_start[i] // BLOCK_M + i, from the first on."""
    origin = tl.load(query_start)
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if (tl.load(query_start + middle) - origin) // BLOCK_M + middle <= block:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _key_tile(
    acc, peak, total, query, query_rope, keys, first, head, at, length, seen, scale,
    WIDTHS: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys from `at` on, of the `length` that begin in memory row `first`; query i sees seen[i] of them."""
    place = at + tl.arange(0, BLOCK_N)
    there = place < length
    row = (first + place).to(tl.int64)
    nope, rope, value = tl.arange(0, WIDTHS.padded_nope), tl.arange(0, WIDTHS.padded_rope), tl.arange(0, WIDTHS.padded_value)  # fmt: skip  # noqa: E501
    key = tl.load(
        keys.key + row[:, None] * keys.stride_key + head * keys.stride_key_head + nope[None, :],
        there[:, None] & (nope < WIDTHS.nope)[None, :], other=0.0,
    )  # fmt: skip
    turned = tl.load(
        keys.turned + row[:, None] * keys.stride_turned + rope[None, :],
        there[:, None] & (rope < WIDTHS.rope)[None, :], other=0.0,
    )  # fmt: skip
    values = tl.load(
        keys.value + row[:, None] * keys.stride_value + head * keys.stride_value_head + value[None, :],
        there[:, None] & (value < WIDTHS.out)[None, :], other=0.0,
    )  # fmt: skip
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.dot(query_rope, tl.trans(turned), scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(place[None, :] < seen[:, None], scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(peak - base)
    total = total * shrunk + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrunk[:, None], input_precision="ieee")
    return acc, highest, total


# Decodes come first in a step, so the alignment of the rest depends on their number.
@triton.jit(
    do_not_specialize=["num_rows", "causal", "merges"],
    do_not_specialize_on_alignment=["query_start", "key_start", "key_lens"],
)
def _latent_prefill(
    out, lse, query, keys, query_start, key_start, key_lens, num_rows, causal, merges, scale, stride_query, num_heads,
    WIDTHS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of a row, one head."""
    VALUE: tl.constexpr = WIDTHS.padded_value
    head = tl.program_id(0)
    # the last query blocks of a prompt see the most keys: they go first, so that none is left over at the end
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _row_of(query_start, block, num_rows, BLOCK_M)
    start = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - start
    first_token = (block - (start - tl.load(query_start)) // BLOCK_M - row) * BLOCK_M
    length = tl.load(key_lens + row)
    if first_token >= query_len or length <= 0:
        return
    token = first_token + tl.arange(0, BLOCK_M)
    real = token < query_len
    nope, rope, value = tl.arange(0, WIDTHS.padded_nope), tl.arange(0, WIDTHS.padded_rope), tl.arange(0, WIDTHS.padded_value)  # fmt: skip  # noqa: E501
    place = (start + token).to(tl.int64)
    source = query + place[:, None] * stride_query + head * (WIDTHS.nope + WIDTHS.rope)
    of_nope = tl.load(source + nope[None, :], real[:, None] & (nope < WIDTHS.nope)[None, :], other=0.0)
    of_rope = tl.load(source + (WIDTHS.nope + rope)[None, :], real[:, None] & (rope < WIDTHS.rope)[None, :], other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    first = tl.load(key_start + row)
    last = length
    full = length // BLOCK_N * BLOCK_N
    seen = tl.zeros([BLOCK_M], tl.int32) + length
    if causal:
        seen = tl.minimum(token + 1, length)
        last = tl.minimum(length, first_token + BLOCK_M)
        full = tl.minimum(full, (first_token + 1) // BLOCK_N * BLOCK_N)
    for at in range(0, full, BLOCK_N):
        acc, peak, total = _key_tile(
            acc, peak, total, of_nope, of_rope, keys, first, head, at, length, seen, scale, WIDTHS, BLOCK_N, False,
        )  # fmt: skip
    for at in range(full, last, BLOCK_N):
        acc, peak, total = _key_tile(
            acc, peak, total, of_nope, of_rope, keys, first, head, at, length, seen, scale, WIDTHS, BLOCK_N, True,
        )  # fmt: skip
    total = tl.where(real, total, 1.0)
    acc = acc / total[:, None]
    size = peak + tl.log2(total)
    where = place * num_heads + head
    target = out + where[:, None] * WIDTHS.out + value[None, :]
    within = real[:, None] & (value < WIDTHS.out)[None, :]
    if merges:
        before = tl.load(lse + where, real, other=0.0)
        highest = tl.maximum(before, size)
        mine, theirs = tl.exp2(size - highest), tl.exp2(before - highest)
        both = mine + theirs
        acc = (acc * mine[:, None] + tl.load(target, within, other=0.0).to(tl.float32) * theirs[:, None]) / both[
            :, None
        ]
        size = highest + tl.log2(both)
    tl.store(target, acc.to(out.dtype.element_ty), within)
    tl.store(lse + where, size, real)


def widths_of(nope: int, rope: int, value: int) -> Widths:
    """The widths of a layer."""
    return Widths(nope, rope, value, *(max(16, triton.next_power_of_2(size)) for size in (nope, rope, value)))


def latent_prefill(
    query: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    query_start: Tensor,
    key_start: Tensor,
    key_lens: Tensor,
    *,
    scale: float,
    causal: bool,
    merges: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends with `query` [T, H, nope + rope] of rows that have new tokens; fills or adds to `out`, `lse` [T, H].

    Row i owns tokens query_start[i] .. query_start[i + 1] of the batch and the key_lens[i] keys from key_start[i] on of
    `keys`: [S, H, nope], turned [S, rope], values [S, H, value]. With `causal` its n-th new token sees n + 1 of them,
    without it all. `lse` is in base 2. A row without keys is left as it is: unless it `merges` every row has some.
    """
    heads = query.shape[1]
    key, turned, value = keys
    widths = widths_of(key.shape[2], turned.shape[1], value.shape[2])
    num_tokens, num_rows = len(query), len(key_lens)
    if not num_tokens or not num_rows:
        return
    launch = launch_for(widths, query.dtype)
    blocks = num_tokens // launch.block_m + num_rows
    _latent_prefill[(heads, blocks)](
        out, lse, query,
        Expanded(
            key, turned, value, key.stride(0), key.stride(1), turned.stride(0), value.stride(0), value.stride(1)
        ),
        query_start, key_start, key_lens, num_rows, int(causal), int(merges), scale * LOG2E.value, query.stride(0),
        heads,
        WIDTHS=widths, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
