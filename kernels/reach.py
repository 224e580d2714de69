"""Which tokens can still win a draw, in Triton, for kernels that compute exact noise for those alone.

Two logarithms a token cost more than reading it. But noise of a hash of size s is -log(-log(1 - s / 2^31)), at most
-log(s / 2^31), so a token can reach the best score so far only where

    s ≤ 2^31 · exp(logit / temperature - best)

which takes a multiplication, an exponential and a comparison.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

#: No token's id.
NONE = tl.constexpr(2147483647)
_LOG2_E = tl.constexpr(math.log2(math.e))
#: Tolerance relative to the numbers that are subtracted; more than the sum of their roundings.
_SLACK = tl.constexpr(2.0**-16)
#: Scale of logits in a row without noise: whatever is below the best by more than rounding can never reach it.
_STEEP = tl.constexpr(2.0**40)


@triton.jit
def bar_of(best, temperature, noisy):
    """(scale, base): a token can reach `best` only if its noise's size is at most 2^(logit · scale + base), or if NaN.

    A row without noise has a scale so steep that only the logit matters.
    """
    unit = tl.where(noisy, _LOG2_E, _STEEP)
    scale = tl.div_rn(unit, tl.where(noisy, temperature, 1.0))
    base = 31.0 - best * unit + (tl.abs(best) * unit + 64.0) * _SLACK
    # Only NaN reaches NaN. Where the best is infinite, or a quotient overflows, base or scale is NaN: all pass.
    base = tl.where(best == best, tl.where(best < float("inf"), base, float("nan")), -float("inf"))
    scale = tl.where((scale > 0.0) & (scale < float("inf")), scale, float("nan"))
    # everything but -inf is more than -inf
    lowest = (best == -float("inf")) & (scale == scale)
    return tl.where(lowest, 1.0 / _STEEP, scale), tl.where(lowest, 1e38, base)


@triton.jit
def over_bar(value, size, scale, base):
    """Below 0 for tokens that cannot reach the bar of (scale, base); at least 0, or NaN, for tokens that may."""
    return tl.exp2(value * scale + base) - size


@triton.jit
def any_over(reach):
    """Whether any result of `over_bar` is at least 0 or NaN."""
    # As int32, the bits of floats below 0 are at most -2^23; those of all others, and of NaN, are greater.
    return tl.max(reach.to(tl.int32, bitcast=True)) > -8388608


@triton.jit
def best_of(score, token):
    """(best or NaN, its lowest id) of scores [N]."""
    wrong = score != score
    highest = tl.max(tl.where(wrong, -float("inf"), score), 0)
    any_wrong = tl.max(wrong.to(tl.int32), 0) > 0
    winner = tl.where(any_wrong, wrong, score == highest)
    return tl.where(any_wrong, float("nan"), highest), tl.min(tl.where(winner, token, NONE), 0)


@triton.jit
def better_of(top, place, highest, winner):
    """(score, id) of the better of two: NaN, then the higher, then the lower id."""
    same = (highest == top) | ((highest != highest) & (top != top))
    better = (highest > top) | ((highest != highest) & (top == top)) | (same & (winner < place))
    return tl.where(better, highest, top), tl.where(better, winner, place)
