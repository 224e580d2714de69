"""What latent attention does between its products and attention itself, in one launch: a norm, and two turned parts.

The reference is `Ops.latent_rotary`. Of a query only the part that turns is read and written, in place, and each latent
once. Knows no layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .norm import normalized
from .rotary import ROUNDED, Positions, angles, load_pairs, store_turned

#: Heads that a program turns, by NUM_WARPS warps: the same for any number of tokens, on which no row's bits depend.
MOST_HEADS, NUM_WARPS = 32, 2


class Queries(NamedTuple):
    """The turned parts of queries [T, heads, ...] from `source` on; strides in elements."""

    source: Any
    number: Any
    stride_token: Any
    stride_head: Any


class Latents(NamedTuple):
    """Latents [T, rank + width], where they go, the weight [rank] of their norm."""

    source: Any
    out: Any
    weight: Any
    stride_token: Any
    rank: Any
    width: Any


class Norming(NamedTuple):
    """How the first part of a latent is normalised, and what it is multiplied with then."""

    eps: Any
    offset: Any
    scale: Any


class Angles(NamedTuple):
    """Positions [T] or [axes, T], the axis of each frequency or None, and cosines and sines [positions, 2 · half]."""

    positions: Any
    axes: Any
    stride_axis: Any
    cos_sin: Any
    stride_table: Any
    half: Any


@triton.jit
def _turn(source, target, there, token, by, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Turns the rows at `source` [N, 1] that are `there` by the angles of their token, and writes them to `target`."""
    cos, sin = angles(by.positions, by.axes, by.stride_axis, by.cos_sin, by.stride_table, token, by.half, HALF)
    first, second = load_pairs(source, there, by.half, HALF, INTERLEAVED)
    store_turned(target, first, second, cos, sin, there, by.half, HALF, INTERLEAVED)


@triton.jit
def _write_latent(
    latent, norm, token, by,
    RANK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, RANK)
    kept = lane < latent.rank
    gain = tl.load(latent.weight + lane, mask=kept, other=0.0)
    await_previous(CHAINED)
    source = latent.source + token * latent.stride_token
    target = latent.out + token * (latent.rank + latent.width)
    value = tl.load(source + lane, mask=kept, other=0.0)
    row = normalized(value, gain, latent.rank, norm.eps, norm.offset, OFFSET)
    if SCALED:
        row = (row.to(tl.float32) * norm.scale).to(value.dtype)
    tl.store(target + lane, row, mask=kept)
    key = latent.rank + tl.zeros((1, 1), tl.int32)
    _turn(source + key, target + key, key > 0, token, by, HALF, INTERLEAVED)
    if REST > 0:
        rest = latent.rank + 2 * by.half + tl.arange(0, REST)
        left = rest < latent.rank + latent.width
        tl.store(target + rest, tl.load(source + rest, mask=left, other=0.0), mask=left)


@triton.jit
def _latent_rotary(
    query, latent, norm, by,
    HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr,
    OFFSET: tl.constexpr, SCALED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The first program of a token makes its latent, each other one turns HEADS of its queries."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        _write_latent(latent, norm, token, by, RANK, HALF, REST, INTERLEAVED, OFFSET, SCALED, CHAINED)
    else:
        await_previous(CHAINED)
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        rows = query.source + token * query.stride_token + head * query.stride_head
        _turn(rows, rows, head < query.number, token, by, HALF, INTERLEAVED)


def latent_rotary(
    query: Tensor,
    latent: Tensor,
    norm: tuple[Tensor, float, float],
    positions: Positions,
    cos_sin: Tensor,
    interleaved: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """As `Ops.latent_rotary`; the last dimension of both contiguous, any other strides."""
    weight, eps, offset = norm
    tokens, rank, half = len(latent), len(weight), cos_sin.shape[1] // 2
    width = latent.shape[1] - rank
    out = torch.empty(latent.shape, dtype=latent.dtype, device=latent.device)
    if tokens:
        number, turned = query.shape[1], query[..., query.shape[2] - width :]
        heads, rest = min(MOST_HEADS, triton.next_power_of_2(number)), width - 2 * half
        places, axes = (positions, None) if isinstance(positions, Tensor) else positions
        _latent_rotary[(tokens, 1 + triton.cdiv(number, heads))](
            Queries(turned, number, turned.stride(0), turned.stride(1)),
            Latents(latent, out, weight, latent.stride(0), rank, width), Norming(eps, offset, scale),
            Angles(places, axes, places.stride(0), cos_sin, cos_sin.stride(0), half),
            HEADS=heads, RANK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(rest) if rest else 0, INTERLEAVED=interleaved, OFFSET=offset != 0.0,
            SCALED=scale != 1.0, num_warps=NUM_WARPS, **ROUNDED, **chained(latent.device),
        )  # fmt: skip
    return out
