"""Norms that only some families have: without weights, LayerNorms that add a residual, LayerNorms of weight + 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from frame.interfaces import Build
from frame.layers import LayerNorm


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model. Those that are not `weighted` have no tensors in the checkpoint."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    weighted: bool = True

    @property
    def completes_sums(self) -> bool:
        """Whether what such a norm adds to a residual may be each rank's part of a sum."""
        return self.kind == "rms" and self.weighted

    def make(self, build: Build, prefix: str, *, partial: bool = False) -> nn.Module:
        """The norm of hidden states: called with a residual it adds this first and returns (normed, sum)."""
        dim = build.config.hidden_size
        if self.completes_sums:
            return build.norm(prefix, dim, eps=self.eps, offset=self.offset, partial=partial)
        return AddingNorm(self.make_alone(build, prefix, dim))

    def make_final(self, build: Build, *, partial: bool) -> nn.Module:
        """As `make`, for the norm "model.norm" behind the layers, of whatever pipeline stage is built."""
        dim, prefix = build.config.hidden_size, "model.norm"
        if self.completes_sums:
            return build.final_norm(prefix, dim, eps=self.eps, offset=self.offset, partial=partial)
        if build.stage.last:
            return self.make(build, prefix)
        return build.final_norm(prefix, dim, eps=self.eps, kind=self.kind) if self.weighted else Unnormed()

    def make_alone(self, build: Build, prefix: str, dim: int) -> nn.Module:
        """The norm of [..., dim], for what has no residual."""
        if not self.weighted:
            return UnweightedNorm(build, dim, self)
        if self.kind == "layer" and self.offset:
            return ShiftedLayerNorm(build, prefix, dim, self)
        return build.norm(prefix, dim, eps=self.eps, kind=self.kind, offset=self.offset)


class Unnormed(nn.Module):
    """Stands where other families have a norm before a part: adds the residual and leaves the sum as it is."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x, or with a residual (x + residual) twice, as a norm gives (normed, sum); all [T, hidden_size]."""
        if residual is None:
            return x
        total = x + residual
        return total, total


class AddingNorm(nn.Module):
    """`norm` of a sum, as an `RMSNorm` is called: with what is to be added to a residual, and this."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual); all [T, hidden_size]."""
        if residual is None:
            normed: Tensor = self.norm(x)
            return normed
        total = x + residual
        return self.norm(total), total


class UnweightedNorm(nn.Module):
    """x / rms(x), or (x - mean) / std of x, over the last dimension."""

    ones: Tensor

    def __init__(self, build: Build, dim: int, spec: NormSpec) -> None:
        super().__init__()
        self.ops, self.eps, self.is_rms = build.ops, spec.eps, spec.kind == "rms"
        self.register_buffer("ones", torch.ones(dim, dtype=build.dtype, device=build.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        if self.is_rms:
            return self.ops.rms_norm(x, self.ones, self.eps)
        return self.ops.layer_norm(x, self.ones, None, self.eps)


class ShiftedLayerNorm(LayerNorm):
    """(x - mean) / std · (weight + offset) + bias."""

    shifted: Tensor

    def __init__(self, build: Build, prefix: str, dim: int, spec: NormSpec) -> None:
        super().__init__(build, prefix, dim, spec.eps)
        self.offset = spec.offset
        self.register_buffer("shifted", torch.zeros_like(self.weight.data), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] → [..., dim]."""
        return self.ops.layer_norm(x, self.shifted, self.bias, self.eps)

    def finish_load(self) -> None:
        """Adds the offset once, in the weight's dtype, at an address that recorded steps may hold."""
        self.shifted.copy_(self.weight + self.offset)
