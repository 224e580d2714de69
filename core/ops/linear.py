"""Memory of linear layers' weights."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised weight [out_features, in_features], in the memory order in which products are quickest here."""
    return torch.empty((out_features, in_features), dtype=dtype, device=device)
