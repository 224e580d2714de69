"""Greedy choice and the draw in Triton; the references are in `frame.core.ops.sampling` and `.random`.

One pass over the logits: noise is computed where the logit is loaded, and never stored. The vocabulary is split over
programs, a second launch joins the parts: best value, ties to the lowest id. Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .filters import Filters, Noise, draw_filtered
from .noise import gumbel_noise, stream_key

_BLOCK = 1024
_PART = 8192


@triton.jit
def _best_of_part(
    logits, temperature, streams, positions, best, ids, vocab, stride, parts,
    RANDOM: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    heat, key = 0.0, tl.zeros([], tl.int64)
    if RANDOM:
        heat = tl.load(temperature + row)
        key = stream_key(tl.load(streams + row), tl.load(positions + row))
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PART, BLOCK):
        token = part * PART + first + lane
        kept = token < vocab
        value = tl.load(logits + row * stride + token, mask=kept, other=-float("inf")).to(tl.float32)
        if RANDOM:
            if heat > 0.0:
                value = tl.div_rn(value, tl.zeros_like(value) + heat) + gumbel_noise(key, token)
        # NaN beats everything, so that it shows
        better = kept & ((value > top) | ((value != value) & (top == top)))
        top = tl.where(better, value, top)
        place = tl.where(better, token, place)
    wrong = tl.max((top != top).to(tl.int32), 0)
    highest = tl.max(tl.where(top == top, top, -float("inf")), 0)
    winner = tl.where(wrong > 0, top != top, top == highest)
    tl.store(best + row * parts + part, tl.where(wrong > 0, float("nan"), highest))
    tl.store(ids + row * parts + part, tl.min(tl.where(winner, place, 2147483647), 0))


@triton.jit
def _best_of_row(best, ids, tokens, values, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, PARTS)
    kept = lane < parts
    top = tl.load(best + row * parts + lane, mask=kept, other=-float("inf"))
    place = tl.load(ids + row * parts + lane, mask=kept, other=2147483647)
    wrong = tl.max((top != top).to(tl.int32), 0)
    highest = tl.max(tl.where(top == top, top, -float("inf")), 0)
    winner = kept & tl.where(wrong > 0, top != top, top == highest)
    tl.store(tokens + row, tl.min(tl.where(winner, place, 2147483647), 0))
    tl.store(values + row, tl.where(wrong > 0, float("nan"), highest))


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
    parts = triton.cdiv(vocab, _PART)
    device = logits.device
    best = torch.empty((rows, parts), dtype=torch.float32, device=device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int32, device=device)
    values = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        _best_of_part[(rows, parts)](
            logits, temperature, streams, positions, best, ids, vocab, logits.stride(0), parts,
            RANDOM=temperature is not None, PART=_PART, BLOCK=_BLOCK,
        )  # fmt: skip
        _best_of_row[(rows,)](best, ids, tokens, values, parts, PARTS=triton.next_power_of_2(parts))
    return tokens, values
