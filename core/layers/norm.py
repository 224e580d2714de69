"""Normalisation layers, the same on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from torch import Tensor, nn

from ..interfaces.collectives import SingleGroup
from ..ops import Norm
from .linear import empty_parameter
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset), over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(
        self, build: Build, prefix: str, dim: int, eps: float, offset: float = 0.0, *, partial: bool = False
    ) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.offset, self.ops = prefix, dim, eps, offset, build.ops
        self.weight = empty_parameter(build, dim)
        self._group = build.groups.tensor if partial else SingleGroup()

    @property
    def sums(self) -> bool:
        """Whether x, given with a residual, is one of several ranks' parts of a sum."""
        return self._group.size > 1

    @property
    def given(self) -> Norm:
        """(weight, eps, offset), as the ops take a norm."""
        return self.weight, self.eps, self.offset

    def alike(self, other: RMSNorm) -> bool:
        """Whether the two differ in nothing but their weight."""
        return (self.dim, self.eps, self.offset) == (other.dim, other.eps, other.offset)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual); x [..., dim].

        If made as `partial`, x stands for the sum of all ranks' x where there is a residual.
        """
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps, self.offset)
        if self.sums:
            return self._group.all_reduce_normed(x, residual, SummedNorm(self))
        return self.ops.add_rms_norm(x, residual, *self.given)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight)]


class SummedNorm:
    """Implements `NormLayer`: an `RMSNorm` of what has been summed over ranks."""

    def __init__(self, norm: RMSNorm) -> None:
        self._norm = norm
        self.given = norm.given

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._norm.ops.add_rms_norm(x, residual, *self.given)


class LayerNorm(nn.Module):
    """(x - mean) / std · weight + bias, over the last dimension (Ba et al. 2016)."""

    def __init__(self, build: Build, prefix: str, dim: int, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.ops = prefix, dim, eps, build.ops
        self.weight = empty_parameter(build, dim)
        self.bias = empty_parameter(build, dim) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def weight_slots(self) -> list[WeightSlot]:
        slots = [WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight)]
        if self.bias is not None:
            slots.append(WeightSlot(f"{self.prefix}.bias", (self.dim,), self.bias))
        return slots
