"""A norm and the linear layer that reads it: one op where both are of the kinds here, else one after the other.

`residual` is what the norm adds before, None where there is nothing yet.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .linear import AttentionInput, Linear
from .norm import RMSNorm


def normed_linear(norm: nn.Module, linear: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Any, Tensor, Tensor]:
    """(linear(normed), normed, total) with (normed, total) = norm(x, residual); x and residual [T, in_features]."""
    if residual is not None and type(norm) is RMSNorm:
        given = (x, residual, norm.weight, norm.eps, norm.offset)
        if type(linear) is Linear:
            return linear.ops.norm_linear(*given, linear.weight, linear.bias)
        if type(linear) is AttentionInput:
            joined, normed, total = linear.ops.norm_linear(*given, linear.weight, linear.bias)
            return linear.heads(joined), normed, total
    normed, total = (norm(x), x) if residual is None else norm(x, residual)
    return linear(normed), normed, total


def normed_silu_mul(norm: nn.Module, linear: Linear, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(linear.silu_mul(normed), total), of what `normed_linear` calls so."""
    if residual is not None and type(norm) is RMSNorm and type(linear) is Linear:
        given = (x, residual, norm.weight, norm.eps, norm.offset)
        return linear.ops.norm_linear_silu_mul(*given, linear.weight, linear.bias)
    normed, total = (norm(x), x) if residual is None else norm(x, residual)
    return linear.silu_mul(normed), total
