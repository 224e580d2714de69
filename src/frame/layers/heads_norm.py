"""RMS norms of queries and keys over the features of all heads, of which each rank has some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from frame.core.layers.linear import empty_parameter, local_kv_heads
from frame.core.layers.weights import WeightSlot

if TYPE_CHECKING:
    from frame.core.layers.build import Build


class HeadsNorm(nn.Module):
    """x / rms(x) · weight over all `num_heads` heads together (OLMo-2), x being those of this rank.

    The checkpoint's weight [num_heads · head_dim] is divided as the heads are. Heads that are fewer than ranks, as
    keys may have, lie on several ranks; their squares are counted once.
    """

    def __init__(self, build: Build, prefix: str, num_heads: int, head_dim: int, *, eps: float) -> None:
        super().__init__()
        self.prefix, self.total, self.eps = prefix, num_heads * head_dim, eps
        self.ops, self.group = build.ops, build.groups.tensor
        count, first = local_kv_heads(prefix, num_heads, self.group)
        self.counts = self.group.rank % max(1, self.group.size // num_heads) == 0
        self.mine = slice(first * head_dim, (first + count) * head_dim)
        self.weight = empty_parameter(build, count * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[T, this rank's heads, head_dim] → the same; of one rank `ops.rms_norm` of [T, dim]."""
        if self.group.size == 1:
            return self.ops.rms_norm(x.flatten(1), self.weight, self.eps).view(x.shape)
        return self.scaled(x, self.group.all_reduce(self.squares(x)))

    def squares(self, x: Tensor) -> Tensor:
        """float32 [T]: this rank's part of the sum of squares; zeros where another rank counts the same heads."""
        flat = x.flatten(1)
        if not self.counts:
            return torch.zeros(len(flat), dtype=torch.float32, device=x.device)
        if self.ops.invariant:
            return _sum_in_halves(flat.float().square())
        squares: Tensor = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float32).square()
        return squares

    def scaled(self, x: Tensor, squares: Tensor) -> Tensor:
        """The normed x, with the sum of squares [T] of all ranks; rounded as `ops.rms_norm` rounds."""
        factor = torch.rsqrt(squares / self.total + self.eps)[:, None]
        return ((x.flatten(1).float() * factor).to(x.dtype) * self.weight).view(x.shape)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", (self.total,), self.weight, (self.mine,))]


def normed_heads(norms: tuple[HeadsNorm, HeadsNorm], query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Each through its norm, with one sum over ranks for both; query [T, H, D], key [T, Hk, D]."""
    of_query, of_key = norms
    if of_query.group.size == 1:
        return of_query(query), of_key(key)
    parts = torch.stack((of_query.squares(query), of_key.squares(key)))
    squares = of_query.group.all_reduce(parts)
    return of_query.scaled(query, squares[0]), of_key.scaled(key, squares[1])


def _sum_in_halves(x: Tensor) -> Tensor:
    """[T, dim] → [T], adding halves until one element is left: how a row is summed does not depend on other rows."""
    while x.shape[1] > 1:
        half, odd = divmod(x.shape[1], 2)
        folded = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat((folded, x[:, 2 * half :]), 1) if odd else folded
    return x.squeeze(1)
