"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import rms_norm


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates the first `rotary_dim` features of each head.

    `query` [T, H, D], `key` [T, Hk, D], `positions` int64 [T], `cos_sin` [max_positions, rotary_dim]: cosines then
    sines, each rotary_dim / 2. `interleaved` pairs neighbours (2i, 2i+1) instead of halves (i, i + rotary_dim/2).
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)


def norm_rotary(
    query: Tensor,
    key: Tensor,
    weights: tuple[Tensor, Tensor],
    eps: float,
    offset: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rotary` of queries and keys that were normalised head by head (`rms_norm` with `weights` [D] of each)."""
    query, key = rms_norm(query, weights[0], eps, offset), rms_norm(key, weights[1], eps, offset)
    return rotary(query, key, positions, cos_sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined, rest), dim=-1) if rest.shape[-1] else joined
