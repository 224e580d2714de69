"""A norm followed by the linear layer that reads it, in one op where one does both."""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

from torch import Tensor, nn

from frame.core.layers.linear import AttentionInput, Linear
from frame.core.layers.norm import RMSNorm
from frame.core.ops import Norm

M = TypeVar("M", bound=nn.Module)


def normed_linear(norm: nn.Module, linear: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor, Tensor]:
    """(linear(normed), normed, total) with (normed, total) = norm(x, residual); x and residual [T, in_features].

    Without a residual normed is norm(x), and total x. Neither module is called where one op does both: an `RMSNorm`
    that sums over no ranks, and a `Linear` or `AttentionInput`, of these very classes and without hooks.
    """
    if residual is not None and _is_plain(norm, RMSNorm) and not norm.sums:
        if _is_plain(linear, Linear):
            return linear.method.apply_normed(linear, x, residual, norm.given, linear.bias)
        if _is_plain(linear, AttentionInput):
            joined, normed, total = linear.method.apply_normed(linear, x, residual, norm.given, linear.bias)
            return linear.heads(joined), normed, total
    normed, total = _normed(norm, x, residual)
    return linear(normed), normed, total


def normed_silu_mul(norm: nn.Module, linear: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(linear.silu_mul(normed), total), where norm(x, residual) gives (normed, total)."""
    if residual is not None and _is_plain(norm, RMSNorm) and not norm.sums and type(linear) is Linear:
        return linear.method.apply_normed_gated(linear, x, residual, norm.given, linear.bias)
    normed, total = _normed(norm, x, residual)
    return linear.silu_mul(normed), total


def plain_norm(norm: nn.Module, linear: nn.Module) -> Norm | None:
    """What an op that does both takes as the norm; None where the modules are to be called, as for `normed_linear`."""
    plain = _is_plain(norm, RMSNorm) and not norm.sums and _is_plain(linear, Linear)
    return norm.given if plain and isinstance(norm, RMSNorm) else None


def _is_plain(module: nn.Module, kind: type[M]) -> TypeGuard[M]:
    """Whether `module` is of exactly this class, without hooks and without a `forward` of its own."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) is kind and not changed


def _normed(norm: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    return (norm(x), x) if residual is None else norm(x, residual)
