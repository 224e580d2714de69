"""Sums of latents by two warpgroups for Hopper, heads as columns of their products, in Gluon.

Each warpgroup takes every second tile of a row, from a place of its own; what the second one found, it leaves for the
first, which joins and stores the sums. Softmax runs in base 2. Knows neither rows nor programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import barrier
from .latent_copies import Views, clear_tail


class Found(NamedTuple):
    """Of a warpgroup's tiles: sums [512, 16] of weights below 1, and for each head the peak and the weights' total."""

    acc: Any
    peak: Any
    total: Any


class Place(NamedTuple):
    """Where a program's sums of weight 1 and their log-sum-exp go, with strides from head to head."""

    out: Any
    lse: Any
    stride_head: Any
    stride_lse: Any


@gluon.jit
def _tile(
    acc, peak, total, number, valid, query, query_turned, views, weights, tiles, scale,
    MASKED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """One tile: updates (acc [512, 16], peak [16], total [64, 16]). If MASKED, its first `valid` latents are read."""
    stage = number % 2
    mbarrier.wait(tiles.ready.index(stage), (number // 2) & 1)
    empty = gl.zeros([64, 16], gl.float32, KIND)
    scores = warpgroup_mma(views.latents.index(stage), query, empty, use_acc=False, is_async=True)
    scores = warpgroup_mma(views.turned.index(stage), query_turned, scores, is_async=True)
    score = warpgroup_mma_wait(0, deps=[scores])
    if MASKED:
        position = gl.arange(0, 64, gl.SliceLayout(1, KIND))
        score = gl.where((position < valid)[:, None], score, float("-inf"))
        clear_tail(views.groups, stage * 8, valid)
    new_peak = gl.maximum(peak, gl.max(score, 0))
    base = new_peak * scale
    weight = gl.exp2(score * scale - base[None, :])
    shrink = gl.exp2(peak * scale - base)
    total = total * shrink[None, :] + weight
    acc = acc * shrink[None, :]
    weights.store(weight.to(tiles.first.dtype))
    fence_async_shared()
    barrier()
    sums = warpgroup_mma(views.numbers.index(stage), weights, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(tiles.free.index(stage), count=1)
    return acc, new_peak, total


@gluon.jit
def find(
    queries, tiles, weights, turn, begun, num_tokens, scale, which,
    KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """What warpgroup `which` finds in its tiles of a part, whose queries are there.

    `turn` parts came before in the program, with `begun` tiles: its tile t, counted over all, is that of warpgroup
    t % 2.
    """
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = tiles.first.dtype
    query = queries.first.index(turn % 2)._reinterpret(dtype, [16, 512], LINES).permute((1, 0))
    query_turned = queries.turned.index(turn % 2).permute((1, 0))
    views = Views(
        tiles.first._reinterpret(dtype, [2, 64, 512], LATENTS),
        tiles.first._reinterpret(dtype, [2, 512, 64], NUMBERS),
        tiles.first._reinterpret(dtype, [16, 64, 64], LINES),
        tiles.turned._reinterpret(dtype, [2, 64, 64], LINES),
    )
    own = weights.index(which).permute((1, 0))
    peak = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(0, KIND))
    total = gl.zeros([64, 16], gl.float32, KIND)
    acc = gl.zeros([512, 16], gl.float32, KIND)
    first, whole = (which + begun) % 2, num_tokens // 64
    for step in range(first, whole, 2):
        acc, peak, total = _tile(
            acc, peak, total, begun + step, 64, query, query_turned, views, own, tiles, scale, False, KIND
        )  # fmt: skip
    rest = num_tokens - whole * 64
    if (rest > 0) & (whole % 2 == first):
        acc, peak, total = _tile(
            acc, peak, total, begun + whole, rest, query, query_turned, views, own, tiles, scale, True, KIND
        )  # fmt: skip
    return Found(acc, peak, gl.sum(total, 0))


@gluon.jit
def leave(found, sums, sizes):
    """Stores what a warpgroup found in shared memory: float32 `sums` [512, 16], `sizes` [2, 16]: peaks and totals."""
    sizes.index(0).store(found.peak)
    sizes.index(1).store(found.total)
    sums.store(found.acc)
    barrier()


@gluon.jit
def take(sums, sizes, KIND: gl.constexpr):
    """What `leave` stored."""
    EACH: gl.constexpr = gl.SliceLayout(0, KIND)
    return Found(sums.load(KIND), sizes.index(0).load(EACH), sizes.index(1).load(EACH))


@gluon.jit
def store_joined(even, odd, scale, place, real_heads, SPLIT: gl.constexpr, KIND: gl.constexpr):
    """Joins and stores what was found in the even tiles of a part and in the odd ones; one of them may have none."""
    peak = gl.maximum(even.peak, odd.peak)
    shrink, odd_shrink = gl.exp2((even.peak - peak) * scale), gl.exp2((odd.peak - peak) * scale)
    total = even.total * shrink + odd.total * odd_shrink
    acc = even.acc * (shrink / total)[None, :] + odd.acc * (odd_shrink / total)[None, :]
    head = gl.arange(0, 16, gl.SliceLayout(0, KIND))
    column = gl.arange(0, 512, gl.SliceLayout(1, KIND))
    at = place.out + (head * place.stride_head)[None, :] + column[:, None]
    gl.store(at, acc.to(place.out.dtype.element_ty), mask=(head < real_heads)[None, :])
    if SPLIT:
        gl.store(place.lse + head * place.stride_lse, peak * scale + gl.log2(total), mask=head < real_heads)
