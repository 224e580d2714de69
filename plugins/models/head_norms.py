"""LayerNorms of queries and keys with weights of their own for each head (Cohere, StableLM)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from frame.interfaces import Build
from frame.layers import WeightSlot


class EachHeadNorm(nn.Module):
    """(x - mean) / std · weight of each head; this rank holds the weights of the heads that it has.

    The checkpoint has one tensor [heads, head_dim] called "PREFIX.weight"; if they are `apart`, one [head_dim] a head,
    "PREFIX.norms.0.weight" and so on. Raises `ValueError` for heads that do not divide over the ranks.
    """

    def __init__(self, build: Build, prefix: str, num_heads: int, head_dim: int, *, eps: float, apart: bool) -> None:
        super().__init__()
        self.prefix, self.num_heads, self.head_dim, self.eps, self.apart = prefix, num_heads, head_dim, eps, apart
        group = build.groups.tensor
        if max(num_heads, group.size) % min(num_heads, group.size):
            raise ValueError(f"the heads of {prefix}: {num_heads} cannot be split over {group.size} ranks")
        self.count, self.first = max(1, num_heads // group.size), group.rank * num_heads // group.size
        empty = torch.empty(self.count, head_dim, dtype=build.dtype, device=build.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's heads, head_dim] → the same shape."""
        return self.ops.map_rows(self._normed, x)

    def _normed(self, x: Tensor) -> Tensor:
        centered = x.float()
        centered = centered - centered.mean(-1, keepdim=True)
        scaled = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight.float()).to(x.dtype)

    def weight_slots(self) -> list[WeightSlot]:
        mine = slice(self.first, self.first + self.count)
        if not self.apart:
            return [WeightSlot(f"{self.prefix}.weight", (self.num_heads, self.head_dim), self.weight, (mine,))]
        slots = list[WeightSlot]()
        for head in range(self.num_heads):
            held = mine.start <= head < mine.stop
            region = (slice(head - mine.start, head - mine.start + 1),) if held else ()
            name = f"{self.prefix}.norms.{head}.weight"
            slots.append(WeightSlot(name, (self.head_dim,), self.weight if held else None, region=region))
        return slots
