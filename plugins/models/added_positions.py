"""Positions that are added to embeddings, learned or of sines, and slopes of scores that fall with the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from frame.interfaces import Build
from frame.layers.rotary import table_device


class NoPositions(nn.Module):
    """Of models whose attention alone knows positions."""

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden_size], as it is given."""
        del positions
        return hidden


class LearnedPositions(nn.Module):
    """Adds rows of a learned table, which has `offset` rows before that of the first token (OPT)."""

    def __init__(self, build: Build, prefix: str, count: int, *, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        self.table = build.embedding(prefix, count + offset, build.config.hidden_size, shard=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, hidden_size], positions int64 [T] → their sum."""
        out: Tensor = hidden + self.table(positions + self.offset)
        return out


class SinePositions(nn.Module):
    """Adds sines of all frequencies, then cosines (Vaswani et al. 2017, in halves instead of in turn).

    Frequency i is base^(-i / divisor). `zeroed` is the position whose row is zero, negative: none.
    """

    table: Tensor

    def __init__(self, build: Build, divisor: float, *, offset: int = 0, zeroed: int = -1) -> None:
        super().__init__()
        device = table_device(build.device)
        places = torch.arange(offset, build.max_model_len + offset, dtype=torch.float32, device=device)
        pairs = torch.arange(build.config.hidden_size // 2, dtype=torch.float32, device=device)
        angles = torch.outer(places, torch.exp(pairs * (-math.log(10000.0) / divisor)))
        table = torch.cat((angles.sin(), angles.cos()), dim=-1)
        if 0 <= zeroed < len(table):
            table[zeroed] = 0
        self.register_buffer("table", table.to(build.device, build.dtype), persistent=False)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden [T, hidden_size], positions int64 [T] → their sum."""
        return hidden + self.table[positions]


def alibi_slopes(num_heads: int, highest: float = 8.0) -> Tensor:
    """float32 [num_heads]: 2^(-highest · i / n), i = 1 … n, with n the power of two below `num_heads` (Press et al.).

    Heads above n take every second slope of 2n heads, from the first on.
    """
    below: int = 1 << (num_heads.bit_length() - 1)
    slopes = torch.exp2(-highest * torch.arange(1, below + 1, dtype=torch.float64) / below)
    between = torch.exp2(-highest * torch.arange(1, 2 * below + 1, 2, dtype=torch.float64) / (2 * below))
    return torch.cat((slopes, between))[:num_heads].float()
