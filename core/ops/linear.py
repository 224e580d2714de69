"""The product of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., in_features] and weight [out_features, in_features]."""
    return torch.nn.functional.linear(x, weight, bias)
