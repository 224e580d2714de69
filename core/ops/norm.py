"""Normalisation references. Statistics are taken in float32, as checkpoints were trained."""

from __future__ import annotations

import torch
from torch import Tensor

#: (weight, eps, offset) of `rms_norm`.
Norm = tuple[Tensor, float, float]


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) · (weight + offset) over the last dimension; x [..., dim], weight [dim] (Zhang & Sennrich 2019).

    With `offset` (Gemma) the product is taken in float32 and rounded once; without it, as Llama does, the normalised
    value is rounded to x's dtype first.
    """
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (value * (weight.float() + offset)).to(x.dtype)
    return weight * value.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual): the pre-norm residual step of a block."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / std · weight + bias over the last dimension (Ba et al. 2016)."""
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
