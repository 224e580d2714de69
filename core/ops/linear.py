"""Linear layers: their product, and the memory of their weights."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised weight [out_features, in_features], in the memory order in which products are quickest here."""
    return torch.empty((out_features, in_features), dtype=dtype, device=device)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., in_features] and weight [out_features, in_features]."""
    return torch.nn.functional.linear(x, weight, bias)
