"""Greedy choice and the unfiltered draw in Triton; the references are in `frame.core.ops.sampling` and `.random`.

One pass over the logits: noise is computed where the logit is loaded, and never stored. The vocabulary is split over
programs, a second launch joins the parts: best value, ties to the lowest id. Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_PART = 8192
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_TOKEN_1 = tl.constexpr(0x7FEB352D)
_TOKEN_2 = tl.constexpr(0x846CA68B)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Logical shift to the right of a signed 64-bit integer."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _key(stream, position):
    x = stream + position * 8
    x ^= _shift(x, 30)
    x *= _MIX_1
    x ^= _shift(x, 27)
    x *= _MIX_2
    x ^= _shift(x, 31)
    return x


@triton.jit
def _noise(key, token):
    low, high = key.to(tl.uint32, bitcast=False), (key >> 32).to(tl.uint32, bitcast=False)
    x = token.to(tl.uint32) + low
    x ^= x >> 16
    x *= _TOKEN_1
    x ^= x >> 15
    x += high
    x *= _TOKEN_2
    x ^= x >> 16
    size = tl.abs(x.to(tl.int32, bitcast=True).to(tl.float32))
    size = tl.minimum(tl.maximum(size, 0.25), 2147483520.0)
    return -tl.log(-_log1p(size * (-1.0 / 2147483648.0)))


@triton.jit
def _log1p(x):
    """log(1 + x) with the full precision of a small x (Kahan): x · log(u) / (u - 1) for u = 1 + x."""
    u = 1.0 + x
    exact = u == 1.0
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))


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
        key = _key(tl.load(streams + row), tl.load(positions + row))
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PART, BLOCK):
        token = part * PART + first + lane
        kept = token < vocab
        value = tl.load(logits + row * stride + token, mask=kept, other=-float("inf")).to(tl.float32)
        if RANDOM:
            if heat > 0.0:
                value = value / heat + _noise(key, token)
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


def draw(logits: Tensor, temperature: Tensor, streams: Tensor, positions: Tensor) -> Tensor:
    """As `frame.core.ops.sampling.draw` where no row has a filter."""
    return _launch(logits, temperature, streams, positions)[0]


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
