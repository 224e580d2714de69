"""The methods of layers whose weights are of the model's dtype, and `Methods`, which finds the method of each layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..interfaces.adapters import Adapters, NoAdapters
from ..interfaces.attention import AttentionSpec
from ..interfaces.experts import ExpertMethod, ExpertSpec
from ..interfaces.quantization import (
    EmbeddingMethod,
    EmbeddingSpec,
    Gated,
    LinearMethod,
    LinearSpec,
    Quantization,
    Unquantized,
)
from ..ops import Norm
from .weights import WeightSlot


class PlainLinear(LinearMethod):
    """`layer.weight` [out_features, width], read from "PART.weight"."""

    def create(self, layer: Any) -> list[WeightSlot]:
        spec = layer.spec
        layer.weight = layer.empty(spec.out_features, spec.width)
        return WeightSlot.sharded("weight", layer.weight, spec, transposed=spec.transposed)

    def pack(self, layer: Any) -> None:
        _pack(layer)

    def unpack(self, layer: Any) -> None:
        _unpack(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = layer.ops.linear(x, layer.weight, bias)
        return out

    def apply_into(self, layer: Any, out: Tensor, x: Tensor) -> Tensor:
        into: Tensor = layer.ops.linear_into(out, x, layer.weight)
        return into

    def apply_gated(self, layer: Any, x: Tensor, bias: Tensor | None, activation: Gated = "silu") -> Tensor:
        if activation != "silu":
            return super().apply_gated(layer, x, bias, activation)
        out: Tensor = layer.ops.linear_silu_mul(x, layer.weight, bias)
        return out

    def apply_normed(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = layer.ops.norm_linear(x, residual, norm, layer.weight, bias)
        return out

    def apply_normed_gated(
        self, layer: Any, x: Tensor, residual: Tensor, norm: Norm, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = layer.ops.norm_linear_silu_mul(x, residual, norm, layer.weight, bias)
        return out


class PlainEmbedding(EmbeddingMethod):
    """`layer.weight` [num_rows, dim], read from "PREFIX.weight"."""

    copies = True

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: EmbeddingSpec = layer.spec
        layer.weight = layer.empty(spec.num_rows, spec.dim)
        layer.weight.data[spec.used :].zero_()
        rows, region = slice(spec.start, spec.start + spec.used), (slice(0, spec.used),)
        shape = (spec.vocab_size, spec.dim)
        return [WeightSlot(f"{layer.prefix}.weight", shape, layer.weight, (rows,), region)]

    def pack(self, layer: Any) -> None:
        if layer.spec.head:
            _pack(layer)
        elif layer.is_tied and layer.packed is None:  # a head reads it packed, and rows are looked up as they were
            layer.packed = layer.ops.packed(layer.weight)

    def unpack(self, layer: Any) -> None:
        layer.packed = None
        _unpack(layer)

    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        out: Tensor = layer.ops.lookup(ids, layer.weight)
        return out

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = layer.ops.linear(x, layer.weight if layer.packed is None else layer.packed, bias)
        return out


def _pack(layer: Any) -> None:
    """Packs `layer.weight`, which stays the parameter that it is."""
    if not layer.weight.is_mkldnn and (packed := layer.ops.packed(layer.weight)) is not None:
        torch.utils.swap_tensors(layer.weight, nn.Parameter(packed, requires_grad=False))


def _unpack(layer: Any) -> None:
    if layer.weight.is_mkldnn:
        torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach().to_dense(), requires_grad=False))


@dataclass
class Methods:
    """Asks the format of a model for the method of each layer, and gives the plain one where it has none.

    The linear layers that do not need exact results may have adapters around their methods. With `kv_is_set` the user
    has said in what type the KV cache is, so that the format is not asked.
    """

    quantization: Quantization = field(default_factory=Unquantized)
    kv_is_set: bool = False
    adapters: Adapters = field(default_factory=NoAdapters)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """The method of a linear layer."""
        inner = self.quantization.linear(spec.prefix, spec) or PlainLinear()
        return inner if spec.exact else self.adapters.linear(spec.prefix, spec, inner)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod:
        """The method of an embedding or head."""
        return self.quantization.embedding(prefix, spec) or PlainEmbedding()

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        """The method of a layer of experts; None for the plain one."""
        return self.quantization.experts(prefix, spec)

    def kv_dtype(self, prefix: str, spec: AttentionSpec) -> torch.dtype:
        """The type of an attention layer's cache."""
        found = None if self.kv_is_set else self.quantization.cache(prefix, spec)
        return spec.kv_dtype if found is None else found.kv_dtype
