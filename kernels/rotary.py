"""Rotary position embedding in Triton, with the norms of query and key heads before it.

The references are in `frame.core.ops.layers`. Query and key in one launch, positions on one axis or several. Knows no
layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained

#: As `frame.core.ops.layers.Positions`.
Positions = Tensor | tuple[Tensor, Tensor]

#: Heads of a warp: the same for any number of tokens, on which no row's bits depend.
WARP_HEADS = 4
#: From so many tokens on, a program has so many warps: on an H200, 20.8 µs for 8,192 tokens of 17 heads, 30.4 with two.
MANY_TOKENS, MANY_WARPS = 512, 4
#: Products and sums are rounded one by one, as by the reference: which of them the compiler would fuse depends on the
#: number of warps, and so a token's bits on how many others there are.
ROUNDED = {"enable_fp_fusion": False}


class Heads(NamedTuple):
    """Queries or keys [T, heads, D], where they go, the weight [D] of their norm or None, strides in elements."""

    source: Any
    out: Any
    weight: Any
    number: Any
    stride_token: Any
    stride_head: Any


@triton.jit
def angles(positions, axes, stride_axis, cos_sin, stride_table, token, half, HALF: tl.constexpr):
    """(cosines, sines) [1, HALF] of a token. With `axes` the position of each lane is that on its axis."""
    lane = tl.arange(0, HALF)[None, :]
    in_half = lane < half
    if axes is not None:
        axis = tl.load(axes + lane, mask=in_half, other=0)
        position = tl.load(positions + axis * stride_axis + token, mask=in_half, other=0)
    else:
        position = tl.load(positions + token)
    row = cos_sin + position * stride_table + lane
    return tl.load(row, mask=in_half, other=0.0), tl.load(row + half, mask=in_half, other=0.0)


@triton.jit
def load_pairs(source, there, half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two features of each pair, [N, HALF], of the rows at `source` [N, 1] that are `there`.

    Neighbours are read together and parted in registers, so that no access leaves out every second number.
    """
    if INTERLEAVED:
        lane = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(source + lane, mask=there & (lane < 2 * half), other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], HALF, 2)))
    else:
        lane = tl.arange(0, HALF)[None, :]
        kept = there & (lane < half)
        first = tl.load(source + lane, mask=kept, other=0.0)
        second = tl.load(source + half + lane, mask=kept, other=0.0)
    return first, second


@triton.jit
def store_turned(target, first, second, cos, sin, there, half, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Turns pairs [N, HALF] by their angles and writes them to the rows at `target`, as `load_pairs` reads them."""
    dtype = first.dtype
    cos, sin = cos.to(dtype), sin.to(dtype)
    # the reference rounds each product to the element type
    turned = (first * cos).to(dtype) - (second * sin).to(dtype)
    other = (second * cos).to(dtype) + (first * sin).to(dtype)
    if INTERLEAVED:
        lane = tl.arange(0, 2 * HALF)[None, :]
        tl.store(target + lane, tl.interleave(turned, other), mask=there & (lane < 2 * half))
    else:
        lane = tl.arange(0, HALF)[None, :]
        kept = there & (lane < half)
        tl.store(target + lane, turned, mask=kept)
        tl.store(target + half + lane, other, mask=kept)


@triton.jit
def _rotary(
    query, key, positions, axes, stride_axis, cos_sin, stride_table, eps, offset, dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, OFFSET: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: HEADS of a token's query and key heads, counted on from the first query head."""
    await_previous(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cos, sin = angles(positions, axes, stride_axis, cos_sin, stride_table, token, half, HALF)
    is_query = head < query.number
    own = tl.where(is_query, head, head - query.number)
    there = head < query.number + key.number
    of_query = query.source + token * query.stride_token + own * query.stride_head
    of_key = key.source + token * key.stride_token + own * key.stride_head
    source = tl.where(is_query, of_query, of_key)
    width = tl.where(is_query, query.number, key.number)
    target = tl.where(is_query, query.out, key.out) + (token * width + own) * dim
    first, second = load_pairs(source, there, half, HALF, INTERLEAVED)
    if REST > 0:
        rest_lane = 2 * half + tl.arange(0, REST)[None, :]
        left = there & (rest_lane < dim)
        rest = tl.load(source + rest_lane, mask=left, other=0.0)
    if query.weight is not None:
        wide, wider = first.to(tl.float32), second.to(tl.float32)
        total = tl.sum(wide * wide + wider * wider, 1)
        if REST > 0:
            last = rest.to(tl.float32)
            total += tl.sum(last * last, 1)
        inverse = tl.rsqrt(total / dim + eps)[:, None]
        weight = tl.where(is_query, query.weight, key.weight)
        scale, second_scale = load_pairs(weight, there, half, HALF, INTERLEAVED)
        first = _scaled(wide * inverse, scale, offset, first.dtype, OFFSET)
        second = _scaled(wider * inverse, second_scale, offset, second.dtype, OFFSET)
        if REST > 0:
            scale = tl.load(weight + rest_lane, mask=left, other=0.0)
            rest = _scaled(last * inverse, scale, offset, rest.dtype, OFFSET)
    store_turned(target, first, second, cos, sin, there, half, HALF, INTERLEAVED)
    if REST > 0:
        tl.store(target + rest_lane, rest, mask=left)


@triton.jit
def _scaled(normed, scale, offset, dtype: tl.constexpr, OFFSET: tl.constexpr):
    """A normalised value times its weight, rounded as `frame.core.ops.layers.rms_norm` does."""
    if OFFSET:
        return (normed * (scale.to(tl.float32) + offset)).to(dtype)
    return scale * normed.to(dtype)


def rotary(
    query: Tensor, key: Tensor, positions: Positions, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.layers.rotary`; the head dimension contiguous, any token and head strides."""
    return _launch(query, key, None, 0.0, 0.0, positions, cos_sin, interleaved)


def norm_rotary(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    offset: float,
    positions: Positions,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `frame.core.ops.layers.norm_rotary`, each value read and written once."""
    return _launch(query, key, weights, eps, offset, positions, cos_sin, interleaved)


def _launch(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    offset: float,
    positions: Positions,
    cos_sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    tokens, query_heads, dim = query.shape
    key_heads, half = key.shape[1], cos_sin.shape[1] // 2
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if tokens:
        warps = MANY_WARPS if tokens >= MANY_TOKENS else 1
        heads = warps * WARP_HEADS
        rest = dim - 2 * half
        places, axes = (positions, None) if isinstance(positions, Tensor) else positions
        query_weight, key_weight = weights or (None, None)
        _rotary[(tokens, triton.cdiv(query_heads + key_heads, heads))](
            Heads(query, query_out, query_weight, query_heads, query.stride(0), query.stride(1)),
            Heads(key, key_out, key_weight, key_heads, key.stride(0), key.stride(1)),
            places, axes, places.stride(0), cos_sin, cos_sin.stride(0), eps, offset, dim, half,
            HEADS=heads, HALF=triton.next_power_of_2(half), REST=triton.next_power_of_2(rest) if rest else 0,
            INTERLEAVED=interleaved, OFFSET=offset != 0.0, num_warps=warps, **ROUNDED, **chained(query.device),
        )  # fmt: skip
    return query_out, key_out
