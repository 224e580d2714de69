"""min-p, top-k, top-p and the draw among what they keep, in Triton; references in `frame.core.ops.sampling`.

Two or three launches and no sort: the best of every tile, the sum of a row's probabilities where top-p asks for it,
then a program per row that finds the threshold (kernels/tiles.py says how) and draws among the kept ids. Masses are
the reference's whole numbers. Nothing waits for the device. Knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .noise import gumbel_noise, noise_size, stream_key
from .reach import NONE, any_over, bar_of, best_of, better_of, over_bar
from .tiles import (
    CAP,
    LOWEST,
    MASS,
    STAGES,
    STEP,
    TILE,
    WARPS,
    best_or_nan,
    bisect,
    key_of,
    list_tiles,
    load_tiles,
    part_of,
    scaled,
    search,
    tile_best,
    value_of,
    weight_of,
)

#: Below the best by this much, a probability has no mass.
_REACH = tl.constexpr(28.0)
_PART = 16384
#: Which filters are given: bits of a number.
_TOP_K, _TOP_P, _MIN_P = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@dataclass(frozen=True)
class Filters:
    """One value a row, or None where no row has one; as `frame.core.ops.sampling.keep_threshold` takes them."""

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


@dataclass(frozen=True)
class Noise:
    """What a draw needs beside logits and filters, one value a row."""

    temperature: Tensor
    streams: Tensor
    positions: Tensor


@triton.jit(do_not_specialize=["given"])
def _total_mass(
    logits, temperatures, best, filters, masses, given, vocab, stride, tiles, parts,
    PART: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A part's mass, of rows that top-p alone filters: what other filters keep is few and is summed later."""
    top_k, top_p, min_p, _ = filters
    SCALED: tl.constexpr = temperatures is not None
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wanted = tl.load(top_p + row) < 1.0
    if given & _TOP_K:
        limit = tl.load(top_k + row)
        wanted = wanted & ((limit <= 0) | (limit >= vocab))
    if given & _MIN_P:
        wanted = wanted & (tl.load(min_p + row) <= 0.0)
    temperature = 1.0
    if SCALED:
        temperature = tl.load(temperatures + row)
        wanted = wanted & (temperature > 0.0)
    if wanted:
        tile = tl.arange(0, TILES)
        each = tl.load(best + row * tiles + tile, mask=tile < tiles, other=-float("inf"))
        top = scaled(best_or_nan(each, 0), temperature, SCALED)
        total = tl.zeros([BLOCK], tl.int64)
        for first in range(0, PART, BLOCK):
            token = part * PART + first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
            total += weight_of(scaled(x, temperature, SCALED), top, MASS)
        tl.store(masses + row * parts + part, tl.sum(total, 0))


@triton.jit
def _draw_row(
    logits, listed, count, vocab, temperature, threshold, key, noisy, SCALED, STEP: tl.constexpr, TILE: tl.constexpr
):
    """The id of the best kept score plus noise, ties to the lowest; where a score is NaN, the first of those."""
    top, place = tl.full([], -float("inf"), tl.float32), tl.full([], 0, tl.int32)
    scale, base = bar_of(top, 1.0, noisy)
    for first in tl.range(0, count, STEP, num_stages=STAGES):
        x, token, exists = load_tiles(logits, listed, first, count, vocab, temperature, SCALED, STEP, TILE)
        # NaN is only in rows whose threshold is NaN, where nothing else is kept
        x = tl.where(exists & (x != x), float("inf"), tl.where(exists & (x >= threshold), x, -float("inf")))
        size = noise_size(key, 0, token)
        reach = over_bar(x, size, scale, base)
        if any_over(reach):
            waiting = (reach < 0) == 0
            while tl.max(waiting.to(tl.int32)) > 0:
                chosen = tl.min(tl.where(waiting, token, NONE), 0)
                score = tl.max(tl.where(token == chosen[None, :], x, -float("inf")), 0)
                if noisy:
                    score += gumbel_noise(key, chosen)
                highest, winner = best_of(score, chosen)
                top, place = better_of(top, place, highest, winner)
                scale, base = bar_of(top, 1.0, noisy)
                waiting = waiting & (token != chosen[None, :]) & ((over_bar(x, size, scale, base) < 0) == 0)
    return place


@triton.jit(do_not_specialize=["given"])
def _filter(
    logits, noise, best, masses, filters, scratch, out, given, vocab, stride, tiles, parts,
    STEP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program: a row's threshold, a draw among what it keeps, or both: what `out` has room for."""
    temperatures, streams, positions = noise
    top_k, top_p, min_p, log_min_p = filters
    listed, found = scratch
    thresholds, tokens = out
    row = tl.program_id(0).to(tl.int64)
    SCALED: tl.constexpr = temperatures is not None
    temperature = 1.0
    random = True
    if SCALED:
        temperature = tl.load(temperatures + row)
        random = temperature > 0.0
        temperature = tl.where(random, temperature, 1.0)
    tile = tl.arange(0, TILES)
    inside = tile < tiles
    each = tl.load(best + row * tiles + tile, mask=inside, other=-float("inf"))
    each = scaled(each, temperature, SCALED)
    top = best_or_nan(each, 0)
    logits += row * stride
    listed += row * tiles
    found += row * CAP
    finite = tl.abs(top) < float("inf")
    threshold = tl.where(top == -float("inf"), LOWEST, top)
    if finite & random:
        threshold = tl.zeros_like(top) + LOWEST
        limit, share = tl.full([], 0, tl.int64), tl.zeros_like(top) + 1.0
        whole = top == top
        if given & _MIN_P:
            whole = tl.load(min_p + row) <= 0.0
            threshold = tl.maximum(top + tl.load(log_min_p + row), LOWEST)
        if given & _TOP_K:
            limit = tl.load(top_k + row).to(tl.int64)
        if given & _TOP_P:
            share = tl.load(top_p + row)
        limited = (limit > 0) & (limit < vocab)
        whole = whole & (limited == 0)
        # top-k, then top-p: one search in the code, and two in rows that have both
        for turn in range(tl.where(limited, 0, 1), tl.where(share < 1.0, 2, 1)):
            unit = tl.where(turn == 1, MASS, 1.0)
            goal = limit
            low = key_of(threshold)
            if turn == 1:
                goal = tl.full([], -1, tl.int64)
                if whole:
                    part = tl.arange(0, PARTS)
                    goal = part_of(tl.sum(tl.load(masses + row * parts + part, mask=part < parts, other=0), 0), share)
                    # all that has mass reaches every goal
                    low = tl.maximum(low, key_of(top - _REACH))
            if goal > 0:
                none = tl.full([], 0, tl.int64)
                low = bisect(each, inside, weight_of(each, top, unit), goal, none, low, key_of(top) + 1)
            count = list_tiles(listed, each, inside, value_of(low))
            reached = search(
                logits, listed, count, vocab, temperature, top, found, goal, share, low, unit, SCALED, STEP, TILE, CAP
            )  # fmt: skip
            threshold = tl.maximum(threshold, reached)
    if thresholds is not None:
        tl.store(thresholds + row, threshold)
    if tokens is not None:
        key = tl.full([], 0, tl.int64)
        if finite & random:
            key = stream_key(tl.load(streams + row), tl.load(positions + row))
        count = list_tiles(listed, each, inside, threshold)
        token = _draw_row(
            logits, listed, count, vocab, temperature, threshold, key, finite & random, SCALED, STEP, TILE
        )
        tl.store(tokens + row, token)


def keep_threshold(
    scores: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None, min_p: Tensor | None = None
) -> Tensor:
    """As `frame.core.ops.sampling.keep_threshold`."""
    thresholds = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    _launch(scores, Filters(top_k, top_p, min_p), None, thresholds, None)
    return thresholds


def draw_filtered(logits: Tensor, noise: Noise, filters: Filters) -> Tensor:
    """As `frame.core.ops.sampling.draw`, for rows of which any may have filters."""
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _launch(logits, filters, noise, None, tokens)
    return tokens


def _launch(
    logits: Tensor, filters: Filters, noise: Noise | None, thresholds: Tensor | None, tokens: Tensor | None
) -> None:
    rows, vocab = logits.shape
    if not rows:
        return
    best = tile_best(logits)
    tiles, parts = best.shape[1], triton.cdiv(vocab, _PART)
    size = triton.next_power_of_2(tiles)
    device = logits.device
    listed = torch.empty((rows, tiles), dtype=torch.int32, device=device)
    found = torch.empty((rows, CAP), dtype=torch.float32, device=device)
    masses = torch.empty((rows, parts), dtype=torch.int64, device=device)
    draw = (None, None, None) if noise is None else (noise.temperature, noise.streams, noise.positions)
    # what is not given is not read: one compiled version serves every mix
    top_k = listed if filters.top_k is None else filters.top_k
    top_p = found if filters.top_p is None else filters.top_p
    min_p, log_min_p = (found, found) if filters.min_p is None else (filters.min_p, filters.min_p.log())
    values = (top_k, top_p, min_p, log_min_p)
    given = 0
    for one, bit in ((filters.top_k, _TOP_K), (filters.top_p, _TOP_P), (filters.min_p, _MIN_P)):
        given |= 0 if one is None else bit.value
    if filters.top_p is not None:
        _total_mass[(rows, parts)](
            logits, draw[0], best, values, masses, given, vocab, logits.stride(0), tiles, parts,
            PART=_PART, BLOCK=2048, TILES=size, num_warps=WARPS,
        )  # fmt: skip
    _filter[(rows,)](
        logits, draw, best, masses, values, (listed, found), (thresholds, tokens),
        given, vocab, logits.stride(0), tiles, parts,
        STEP=STEP, TILE=TILE, CAP=CAP, TILES=size, PARTS=triton.next_power_of_2(parts), num_warps=WARPS,
    )  # fmt: skip
