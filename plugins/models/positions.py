"""Positions other than by a `RotaryEmbedding`: none, turned before the norms, with scaled queries.

Each module is called as that: (positions int64 [1, T], query [T, H, D], key [T, Hk, D], norms) → query and key.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from frame.interfaces import Build
from frame.layers.rotary import table_device

Norms = tuple[nn.Module, nn.Module]


class Unturned(nn.Module):
    """For layers without positions: normalises where there are norms, and turns nothing."""

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, norms: Norms | None = None
    ) -> tuple[Tensor, Tensor]:
        del positions
        return (query, key) if norms is None else (norms[0](query), norms[1](key))


class TurnedFirst(nn.Module):
    """Normalises what has been turned already; other families turn what has been normalised."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, norms: Norms | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key = self.rotary(positions, query, key)
        return (query, key) if norms is None else (norms[0](query), norms[1](key))


class ScaledQueries(nn.Module):
    """Multiplies turned queries by 1 + beta · ln(1 + ⌊position / length⌋), for long contexts (Llama 4)."""

    scales: Tensor

    def __init__(self, build: Build, rotary: nn.Module, beta: float, length: int) -> None:
        super().__init__()
        self.rotary = rotary
        positions = torch.arange(build.max_model_len, dtype=torch.float32, device=table_device(build.device))
        scales = 1 + beta * torch.log(1 + torch.floor(positions / length))
        self.register_buffer("scales", scales.to(build.device, build.dtype), persistent=False)

    def forward(
        self, positions: Tensor, query: Tensor, key: Tensor, norms: Norms | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key = self.rotary(positions, query, key, norms)
        return query * self.scales[positions[0], None, None], key
