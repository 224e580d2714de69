"""Finding values in long rows without sorting them: best values by tile, and a search that reads few tiles.

A row is cut in tiles of 128. One launch reads everything and keeps each tile's best; after it a program per row knows
which tiles can hold anything at or above a bound, and reads those alone. The k-th best tile is such a bound for the
k-th best value, so k tiles are read and not the row (the pieces of a search here are for kernels/filters.py and
kernels/logprobs.py).

A search wants the largest t for which the weights of all values ≥ t reach a goal; weights are whole numbers (1 each,
or probabilities as integers), so the answer depends on no order of summation. Candidates are gathered to `CAP` places;
while there are more, passes with three pivots narrow the range. Then the bits of t are bisected in registers.
Knows no request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Values a tile has.
TILE = 128
#: Tiles that one step of a search looks at.
STEP = 16
#: Candidates of a row that are searched in registers.
CAP = 2048
WARPS = 8
#: Steps whose loads are under way at once.
STAGES = tl.constexpr(3)
#: The lowest finite value.
LOWEST = tl.constexpr(-(2.0**128 - 2.0**104))
#: The mass of the best.
MASS = tl.constexpr(float(2**40))
_LINEAR_TURNS = tl.constexpr(6)


@triton.jit
def _tile_best(logits, best, vocab, stride, tiles, STEP: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * STEP + tl.arange(0, STEP)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
    tl.store(best + row * tiles + tile, best_or_nan(x, 1), mask=tile < tiles)


@triton.jit
def best_or_nan(x, AXIS: tl.constexpr):
    """The largest along an axis; NaN where there is one."""
    wrong = tl.max((x != x).to(tl.int32), AXIS)
    highest = tl.max(tl.where(x == x, x, -float("inf")), AXIS)
    return tl.where(wrong > 0, float("nan"), highest)


def tile_best(logits: Tensor) -> Tensor:
    """float32 [N, ⌈V / 128⌉]: the best of each tile of `logits` [N, V], NaN where it holds one."""
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    best = torch.empty((rows, tiles), dtype=torch.float32, device=logits.device)
    grid = (rows, triton.cdiv(tiles, STEP))
    _tile_best[grid](logits, best, vocab, logits.stride(0), tiles, STEP=STEP, TILE=TILE, num_warps=WARPS)
    return best


@triton.jit
def key_of(x):
    """int64 in the order of float32 values; equal for equal bits."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """The float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, temperature, SCALED: tl.constexpr):
    """x / temperature, rounded as IEEE says, so that ties are those of the reference."""
    if SCALED:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    return x


@triton.jit
def weight_of(x, best, unit):
    """int64: the probability relative to the best as a whole number of `unit`s; 1 where `unit` is 1 or None."""
    if unit is None:
        weight = tl.full(x.shape, 1, tl.int64)
    else:
        # a factor, since a branch in the loops over tiles costs more than an exponential
        steepness = tl.where(unit > 1.0, 1.0, 0.0)
        weight = (tl.exp((x - best) * steepness) * unit).to(tl.int64)
    return weight


@triton.jit
def bisect(x, kept, weight, goal, above, low, high):
    """The largest key in [low, high) from which on the weights reach the goal; `low` does, or counts as if it did.

    `above` is the weight from `high` on.
    """
    while high - low > 1:
        middle = (low + high) >> 1
        reached = above + tl.sum(tl.where(kept & (x >= value_of(middle)), weight, 0), 0) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def list_tiles(listed, best, inside, bound):
    """Writes the numbers of the tiles that hold a value ≥ bound, or NaN, in order; returns how many."""
    tl.debug_barrier()
    chosen = inside & ((best >= bound) | (best != best))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed + place, tl.arange(0, best.shape[0]), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def load_tiles(
    logits, listed, first, count, vocab, temperature, SCALED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr
):
    """(values, ids, which exist) [STEP, TILE] of the listed tiles from `first` on."""
    place = first + tl.arange(0, STEP)
    tile = tl.load(listed + place, mask=place < count, other=0)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    exists = (place < count)[:, None] & (token < vocab)
    x = tl.load(logits + token, mask=exists, other=-float("inf")).to(tl.float32)
    return scaled(x, temperature, SCALED), token, exists


@triton.jit
def _gather(
    logits, listed, count, vocab, temperature, best, found, low, high, unit,
    SCALED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Writes the first CAP values of the keys [low, high); returns their number and the masses of all."""
    tl.debug_barrier()
    least, limit = value_of(low), value_of(high)
    number = tl.full([], 0, tl.int32)
    weights = tl.zeros([STEP, TILE], tl.int64)
    for first in tl.range(0, count, STEP, num_stages=STAGES):
        # what does not exist is -inf, and below every bound
        x, _, _ = load_tiles(logits, listed, first, count, vocab, temperature, SCALED, STEP, TILE)
        inside = (x >= least) & (x < limit)
        flat = tl.reshape(inside.to(tl.int32), [STEP * TILE])
        place = number + tl.cumsum(flat, 0) - 1
        tl.store(found + place, tl.reshape(x, [STEP * TILE]), mask=(flat > 0) & (place < CAP))
        number += tl.sum(flat, 0)
        if unit is not None:
            weights += tl.where(inside, weight_of(x, best, unit), 0)
    tl.debug_barrier()
    return number, tl.sum(weights)


@triton.jit
def _pivot(low, high, turn, PART: tl.constexpr):
    """A key strictly between two: by value at first, which suits scores, then by bits, which ends."""
    width = tl.minimum(value_of(high) - value_of(low), 64.0)
    by_value = key_of(value_of(high) - width * (PART / 4))
    by_bits = high - (((high - low) * PART) >> 2)
    key = tl.where(turn < _LINEAR_TURNS, by_value, by_bits)
    return tl.minimum(tl.maximum(key, low + 1), high - 1)


@triton.jit
def _narrow(
    logits, listed, count, vocab, temperature, best, number, goal, low, high, unit,
    SCALED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Narrows the keys [low, high), which hold `number` values, to CAP of them or one key.

    Returns (low, high, number, weight from high on).
    """
    above = tl.full([], 0, tl.int64)
    beyond = tl.full([], 0, tl.int32)
    turn = tl.full([], 0, tl.int32)
    while (number > CAP) & (high - low > 1):
        key_1 = _pivot(low, high, turn, 1)
        key_2 = tl.minimum(_pivot(low, high, turn, 2), key_1)
        key_3 = tl.minimum(_pivot(low, high, turn, 3), key_2)
        value_1, value_2, value_3 = value_of(key_1), value_of(key_2), value_of(key_3)
        weights_1 = tl.zeros([STEP, TILE], tl.int64)
        weights_2 = tl.zeros([STEP, TILE], tl.int64)
        weights_3 = tl.zeros([STEP, TILE], tl.int64)
        numbers_1 = tl.zeros([STEP, TILE], tl.int32)
        numbers_2 = tl.zeros([STEP, TILE], tl.int32)
        numbers_3 = tl.zeros([STEP, TILE], tl.int32)
        for first in tl.range(0, count, STEP, num_stages=STAGES):
            x, _, _ = load_tiles(logits, listed, first, count, vocab, temperature, SCALED, STEP, TILE)
            weight = weight_of(x, best, unit)
            over_1, over_2, over_3 = x >= value_1, x >= value_2, x >= value_3
            weights_1 += tl.where(over_1, weight, 0)
            weights_2 += tl.where(over_2, weight, 0)
            weights_3 += tl.where(over_3, weight, 0)
            numbers_1 += over_1.to(tl.int32)
            numbers_2 += over_2.to(tl.int32)
            numbers_3 += over_3.to(tl.int32)
        weight_1, weight_2, weight_3 = tl.sum(weights_1), tl.sum(weights_2), tl.sum(weights_3)
        number_1, number_2, number_3 = tl.sum(numbers_1), tl.sum(numbers_2), tl.sum(numbers_3)
        if weight_1 >= goal:
            low, number = key_1, number_1 - beyond
        elif weight_2 >= goal:
            low, high, number, above, beyond = key_2, key_1, number_2 - number_1, weight_1, number_1
        elif weight_3 >= goal:
            low, high, number, above, beyond = key_3, key_2, number_3 - number_2, weight_2, number_2
        else:
            high, number, above, beyond = key_3, number - number_3 + beyond, weight_3, number_3
        turn += 1
    return low, high, number, above


@triton.jit
def search(
    logits, listed, count, vocab, temperature, best, found, goal, share, low, unit,
    SCALED: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The largest value, not below the key `low`, from which on the weights of the row reach the goal.

    Of masses (where `unit` is theirs), a goal below 0 stands for `share` of the weight from `low` on. Of numbers (where
    it is 1 or None), -inf says that fewer values than the goal lie there. The listed tiles must hold every value from
    `low` on.
    """
    high = key_of(best) + 1
    above = tl.full([], 0, tl.int64)
    number = tl.full([], 0, tl.int32)
    fewer = number > 0
    turns = tl.full([], 0, tl.int32)
    # a second turn where there were more than CAP: a loop, so that the code is compiled once
    while turns < 2:
        number, weight = _gather(
            logits, listed, count, vocab, temperature, best, found, low, high, unit, SCALED, STEP, TILE, CAP
        )  # fmt: skip
        turns += 1
        if turns == 1:
            fewer = number < goal
            if unit is not None:
                fewer = fewer & (unit == 1.0)
                goal = tl.where(goal < 0, part_of(weight, share), goal)
            if number > CAP:
                low, high, number, above = _narrow(
                    logits, listed, count, vocab, temperature, best, number, goal, low, high, unit,
                    SCALED, STEP, TILE, CAP,
                )  # fmt: skip
            else:
                turns += 1
    lane = tl.arange(0, CAP)
    kept = lane < number
    x = tl.load(found + lane, mask=kept, other=-float("inf"))
    found_key = bisect(x, kept, weight_of(x, best, unit), goal, above, low, high)
    return tl.where(fewer, -float("inf"), value_of(found_key))


@triton.jit
def part_of(total, share):
    """The least whole number that is at least share · total; 1 at least."""
    return tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
