"""Greedy choice and the draw in Triton; the references are in `frame.core.ops.sampling` and `.random`.

One pass over the logits: noise is computed where the logit is loaded, and never stored. The vocabulary is split over
programs of a warp each, a second launch joins the parts: best value, ties to the lowest id. Knows no request.

A quotient and two logarithms a token would cost more than reading it, so most tokens get neither. Noise of a hash of
size s is -log(-log(1 - s / 2^31)) ≤ -log(s / 2^31); a token can reach the best score so far only where

    s ≤ 2^31 · exp(logit / temperature - best)

which takes a multiplication, an exponential and a comparison. What passes, a few tokens of a part, is scored exactly.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import Filters, Noise, draw_filtered
from .noise import gumbel_noise, noise_size, stream_key

#: A block is so many tokens wide, and of each column one token at a time is scored exactly.
_WIDTH, _DEPTH = 64, 8
_BLOCK = _WIDTH * _DEPTH
#: Programs that fill a large chip, and into how many parts they may divide a row.
_PROGRAMS, _MOST_PARTS = 2048, 64
_LOG2_E = tl.constexpr(math.log2(math.e))
_NONE = tl.constexpr(2147483647)
#: By how much a token may miss, relative to the numbers that are subtracted: all that they were rounded by, and more.
_SLACK = tl.constexpr(2.0**-16)
#: Units of a logit in a row without noise: what is below the best by more than rounding misses it by any size.
_STEEP = tl.constexpr(2.0**40)


@triton.jit
def bar_of(best, heat, noisy):
    """(scale, base): a token can reach `best` only if its noise's size is at most 2^(logit · scale + base), or if NaN.

    A row without noise has a scale so steep that only the logit matters.
    """
    unit = tl.where(noisy, _LOG2_E, _STEEP)
    scale = tl.div_rn(unit, tl.where(noisy, heat, 1.0))
    base = 31.0 - best * unit + (tl.abs(best) * unit + 64.0) * _SLACK
    # only NaN reaches NaN; infinity is reached by what overflows too, and a quotient that does so says nothing
    base = tl.where(best == best, tl.where(best < float("inf"), base, float("nan")), -float("inf"))
    scale = tl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))
    # everything but -inf is more than -inf
    lowest = (best == -float("inf")) & (scale == scale)
    return tl.where(lowest, 1.0 / _STEEP, scale), tl.where(lowest, 1e38, base)


@triton.jit
def _best_of(score, token):
    """(best or NaN, its lowest id) of scores."""
    wrong = score != score
    highest = tl.max(tl.where(wrong, -float("inf"), score), 0)
    any_wrong = tl.max(wrong.to(tl.int32), 0) > 0
    winner = tl.where(any_wrong, wrong, score == highest)
    return tl.where(any_wrong, float("nan"), highest), tl.min(tl.where(winner, token, _NONE), 0)


@triton.jit
def _load_block(logits, start, vocab, lane, SMALL: tl.constexpr):
    """Logits from `start` on; a row shorter than a block ends in -inf."""
    if SMALL:
        return tl.load(logits + lane, mask=lane < vocab, other=-float("inf"))
    return tl.load(logits + start + lane)


@triton.jit(do_not_specialize=["blocks", "parts"])
def _best_of_part(
    logits, temperature, streams, positions, best, ids, vocab, stride, blocks, parts,
    RANDOM: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    BLOCK: tl.constexpr = DEPTH * WIDTH
    logits += row * stride
    heat, key, noisy = tl.zeros([], tl.float32), tl.zeros([], tl.int64), False
    if RANDOM:
        heat = tl.load(temperature + row)
        noisy = heat > 0.0
        key = stream_key(tl.load(streams + row), tl.load(positions + row))
    lane = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top, place = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    scale, base = bar_of(top, heat, noisy)
    # the last block overlaps the one before it, and a token met twice is the same token
    final = 0 if SMALL else vocab - BLOCK
    start = tl.minimum(part * blocks * BLOCK, final)
    following = _load_block(logits, start, vocab, lane, SMALL)
    for _ in range(0, tl.minimum(blocks, tl.cdiv(vocab, BLOCK) - part * blocks)):
        value = following.to(tl.float32)
        later = tl.minimum(start + BLOCK, final)
        following = _load_block(logits, later, vocab, lane, SMALL)
        if RANDOM:
            size = noise_size(key, start, lane)
            reach = tl.exp2(value * scale + base) - size
        else:
            reach = tl.where(value <= top, -1.0, 1.0)
        # of floats below 0 the bits are -2^23 at most, of others and of NaN they are more
        if tl.max(reach.to(tl.int32, bitcast=True)) > -8388608:
            token = start + lane
            waiting = (reach < 0) == 0
            while tl.max(waiting.to(tl.int32)) > 0:
                chosen = tl.min(tl.where(waiting, token, _NONE), 0)
                exists = chosen < vocab
                score = tl.load(logits + chosen, mask=exists, other=0.0).to(tl.float32)
                if RANDOM:
                    if noisy:
                        score = tl.div_rn(score, tl.zeros_like(score) + heat) + gumbel_noise(key, chosen)
                highest, winner = _best_of(tl.where(exists, score, -float("inf")), chosen)
                same = (highest == top) | ((highest != highest) & (top != top))
                better = (highest > top) | ((highest != highest) & (top == top)) | (same & (winner < place))
                top, place = tl.where(better, highest, top), tl.where(better, winner, place)
                waiting = waiting & (token != chosen[None, :])
                if RANDOM:
                    scale, base = bar_of(top, heat, noisy)
                    waiting = waiting & ((size > tl.exp2(value * scale + base)) == 0)
                else:
                    waiting = waiting & ((value < top) == 0)
        start = later
    tl.store(best + row * parts + part, top)
    tl.store(ids + row * parts + part, place)


@triton.jit(do_not_specialize=["parts"])
def _best_of_row(best, ids, tokens, values, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    kept = lane < parts
    top = tl.load(best + row * parts + lane, mask=kept, other=-float("inf"))
    place = tl.load(ids + row * parts + lane, mask=kept, other=_NONE)
    highest, winner = _best_of(top, place)
    tl.store(tokens + row, winner)
    tl.store(values + row, highest)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.sampling.greedy`, for float32 or 16-bit logits [N, V]."""
    return _launch(logits, None, None, None)


def draw(
    logits: Tensor,
    temperature: Tensor,
    streams: Tensor,
    positions: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """As `frame.core.ops.sampling.draw`; one pass over the logits where no row has a filter."""
    if top_k is None and top_p is None and min_p is None:
        return _launch(logits, temperature, streams, positions)[0]
    return draw_filtered(logits, Noise(temperature, streams, positions), Filters(top_k, top_p, min_p))


def _launch(
    logits: Tensor, temperature: Tensor | None, streams: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    most = min(blocks, _MOST_PARTS)
    # of a few rows more parts: which token is best depends on none of them
    each = triton.cdiv(blocks, max(1, min(most, _PROGRAMS // max(1, rows))))
    parts = triton.cdiv(blocks, each)
    device = logits.device
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    values = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        _best_of_part[(rows, parts)](
            logits, temperature, streams, positions, best, ids, vocab, logits.stride(0), each, parts,
            RANDOM=temperature is not None, DEPTH=_DEPTH, WIDTH=_WIDTH, SMALL=vocab < _BLOCK, num_warps=1,
        )  # fmt: skip
        _best_of_row[(rows,)](best, ids, tokens, values, parts, PARTS=triton.next_power_of_2(most), num_warps=1)
    return tokens, values
