"""What poolers compute, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_rows(hidden: Tensor, lengths: Tensor) -> Tensor:
    """float32 [B, dim]: sums over runs of lengths[i] (int64 [B], together T) rows of hidden [T, dim]."""
    return torch.segment_reduce(hidden.float(), "sum", lengths=lengths, axis=0, unsafe=True)


def unit(rows: Tensor) -> Tensor:
    """Each row of [N, dim] scaled to length 1; a row of zeros stays one."""
    return torch.nn.functional.normalize(rows, dim=-1)
