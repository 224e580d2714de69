"""Normalisation layers, the same on every rank, and a norm followed by the linear layer that reads it."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar, overload

from torch import Tensor, nn

from ..interfaces.model import Build
from ..ops import Norm
from .linear import AttentionInput, Linear, empty_parameter
from .weights import WeightSlot

M = TypeVar("M", bound=nn.Module)


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset), over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, build: Build, prefix: str, dim: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.offset, self.ops = prefix, dim, eps, offset, build.ops
        self.weight = empty_parameter(build, dim)

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
        """norm(x), or with a residual (norm(x + residual), x + residual); x [..., dim]."""
        if residual is None:
            return self.ops.rms_norm(x, self.weight, self.eps, self.offset)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight)]


class LayerNorm(nn.Module):
    """(x - mean) / std · weight + bias, over the last dimension (Ba et al. 2016)."""

    def __init__(self, build: Build, prefix: str, dim: int, eps: float) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.ops = prefix, dim, eps, build.ops
        self.weight, self.bias = empty_parameter(build, dim), empty_parameter(build, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def weight_slots(self) -> list[WeightSlot]:
        return [
            WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight),
            WeightSlot(f"{self.prefix}.bias", (self.dim,), self.bias),
        ]


def normed_linear(norm: nn.Module, linear: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor, Tensor]:
    """(linear(normed), normed, total) with (normed, total) = norm(x, residual); x and residual [T, in_features].

    Without a residual normed is norm(x), and total x. Neither module is called where one op does both: an `RMSNorm`,
    and a `Linear` or `AttentionInput`, of these very classes and without hooks.
    """
    if residual is not None and _is_plain(norm, RMSNorm):
        if _is_plain(linear, Linear):
            return linear.ops.norm_linear(x, residual, norm.given, linear.weight, linear.bias)
        if _is_plain(linear, AttentionInput):
            joined, normed, total = linear.ops.norm_linear(x, residual, norm.given, linear.weight, linear.bias)
            return linear.heads(joined), normed, total
    normed, total = _normed(norm, x, residual)
    return linear(normed), normed, total


def normed_silu_mul(norm: nn.Module, linear: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(linear.silu_mul(normed), total), where norm(x, residual) gives (normed, total)."""
    if residual is not None and _is_plain(norm, RMSNorm) and type(linear) is Linear:
        return linear.ops.norm_linear_silu_mul(x, residual, norm.given, linear.weight, linear.bias)
    normed, total = _normed(norm, x, residual)
    return linear.silu_mul(normed), total


def _is_plain(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether `module` is of exactly this class, without hooks and without a `forward` of its own."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not changed


def _normed(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return (norm(x), x) if residual is None else norm(x, residual)
