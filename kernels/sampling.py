"""Greedy choice and the draw in Triton; the references are in `frame.core.ops.sampling` and `.random`.

One pass over the logits: noise is computed where the logit is loaded, and never stored. The vocabulary is split over
programs of a warp each, a second launch joins the parts: best value, ties to the lowest id. Exact noise, and the exact
quotient, are for the few tokens that can still win (kernels/reach.py says which). Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import Filters, Noise, draw_filtered
from .noise import gumbel_noise, noise_size, shifted_key, stream_key
from .reach import NONE, any_over, bar_of, best_of, better_of, over_bar

#: A block is so many tokens wide, and of each column one token at a time is scored exactly.
_WIDTH, _DEPTH = 64, 8
_BLOCK = _WIDTH * _DEPTH
#: Programs that fill a large chip, and into how many parts they may divide a row.
_PROGRAMS, _MOST_PARTS = 2048, 64


@triton.jit
def _load_block(logits, start, vocab, lane, SMALL: tl.constexpr):
    """Logits from `start` on; a row shorter than a block ends in -inf."""
    if SMALL:
        return tl.load(logits + lane, mask=lane < vocab, other=-float("inf"))
    return tl.load(logits + start + lane)


@triton.jit(do_not_specialize=["first", "blocks", "parts"])
def _best_of_part(
    logits, temperatures, streams, positions, best, ids, vocab, stride, first, blocks, parts,
    RANDOM: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    BLOCK: tl.constexpr = DEPTH * WIDTH
    logits += row * stride
    temperature, key, noisy = tl.zeros([], tl.float32), tl.zeros([], tl.int64), False
    if RANDOM:
        temperature = tl.load(temperatures + row)
        noisy = temperature > 0.0
        key = shifted_key(stream_key(tl.load(streams + row), tl.load(positions + row)), first)
    lane = tl.arange(0, DEPTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top, place = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    scale, base = bar_of(top, temperature, noisy)
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
            reach = over_bar(value, size, scale, base)
        else:
            reach = tl.where(value <= top, -1.0, 1.0)
        if any_over(reach):
            token = start + lane
            waiting = (reach < 0) == 0
            while tl.max(waiting.to(tl.int32)) > 0:
                chosen = tl.min(tl.where(waiting, token, NONE), 0)
                exists = chosen < vocab
                score = tl.load(logits + chosen, mask=exists, other=0.0).to(tl.float32)
                if RANDOM:
                    if noisy:
                        score = tl.div_rn(score, tl.zeros_like(score) + temperature) + gumbel_noise(key, chosen)
                highest, winner = best_of(tl.where(exists, score, -float("inf")), chosen)
                top, place = better_of(top, place, highest, winner)
                waiting = waiting & (token != chosen[None, :])
                if RANDOM:
                    scale, base = bar_of(top, temperature, noisy)
                    waiting = waiting & ((over_bar(value, size, scale, base) < 0) == 0)
                else:
                    waiting = waiting & ((value < top) == 0)
        start = later
    tl.store(best + row * parts + part, top)
    tl.store(ids + row * parts + part, place)


@triton.jit(do_not_specialize=["first", "parts"])
def _best_of_row(
    logits, best, ids, tokens, scores, values, stride, first, parts, PARTS: tl.constexpr, VALUES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PARTS)
    kept = lane < parts
    top = tl.load(best + row * parts + lane, mask=kept, other=-float("inf"))
    place = tl.load(ids + row * parts + lane, mask=kept, other=NONE)
    highest, winner = best_of(top, place)
    tl.store(tokens + row, winner + first)
    tl.store(scores + row, highest)
    if VALUES:
        tl.store(values + row, tl.load(logits + row * stride + winner).to(tl.float32))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.sampling.greedy`, for float32 or 16-bit logits [N, V]."""
    return _launch(logits, None, None, None)[:2]


def best_of_part(
    logits: Tensor,
    first: int,
    temperature: Tensor | None = None,
    streams: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `frame.core.ops.sampling.best_of_part`, for float32 or 16-bit logits; two launches."""
    token_ids, scores, values = _launch(logits, temperature, streams, positions, first, values=temperature is not None)
    return scores, token_ids, values


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
    logits: Tensor,
    temperature: Tensor | None,
    streams: Tensor | None,
    positions: Tensor | None,
    first: int = 0,
    *,
    values: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token ids, scores, logits) of the best of each row, whose column c is token `first` + c.

    Without `values` the third are the scores again.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    most = min(blocks, _MOST_PARTS)
    # few rows are split into more parts; the split changes no result
    each = triton.cdiv(blocks, max(1, min(most, _PROGRAMS // max(1, rows))))
    parts = triton.cdiv(blocks, each)
    device = logits.device
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    scores = torch.empty(rows, dtype=torch.float32, device=device)
    found = torch.empty_like(scores) if values else scores
    if rows:
        _best_of_part[(rows, parts)](
            logits, temperature, streams, positions, best, ids, vocab, logits.stride(0), first, each, parts,
            RANDOM=temperature is not None, DEPTH=_DEPTH, WIDTH=_WIDTH, SMALL=vocab < _BLOCK, num_warps=1,
        )  # fmt: skip
        _best_of_row[(rows,)](
            logits, best, ids, tokens, scores, found, logits.stride(0), first, parts,
            PARTS=triton.next_power_of_2(most), VALUES=values, num_warps=1,
        )  # fmt: skip
    return tokens, scores, found
