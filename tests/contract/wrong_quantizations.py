"""Formats of weights that are wrong in one way each."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import (
    Dispatched,
    EmbeddingMethod,
    EmbeddingSpec,
    ExpertMatrices,
    ExpertMethod,
    ExpertSpec,
    LinearMethod,
    LinearSpec,
)
from frame.layers import PlainEmbedding, PlainExperts, WeightSlot
from tests.contract.coded_experts import Coded, CodedExperts
from tests.contract.quantizations import Rounded, RoundedLinear


class _Moving(RoundedLinear):
    def finish_load(self, layer: Any) -> None:
        layer.scales.data = layer.scales.data.clone()


class Moving(Rounded):
    """Gives a parameter another address once it is loaded."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Moving()


class _Deaf(RoundedLinear):
    def apply_gated(self, layer: Any, x: Tensor, bias: Tensor | None, activation: Any = "silu") -> Tensor:
        return super().apply_gated(layer, x, bias, "silu")


class Deaf(Rounded):
    """Takes every gate for silu."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Deaf()


class _Coarse(RoundedLinear):
    def round(self, layer: Any, rows: slice, piece: Tensor) -> None:
        super().round(layer, rows, piece)
        layer.codes[rows] = layer.codes[rows] // 64 * 64


class Coarse(Rounded):
    """Keeps two bits."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Coarse()


class _PerShare(RoundedLinear):
    def round(self, layer: Any, rows: slice, piece: Tensor) -> None:
        super().round(layer, rows, piece)
        layer.scales[rows] = layer.scales[rows].amax()
        layer.scales[rows] *= torch.tensor(len(piece) / 256)


class PerShare(Rounded):
    """Scales weights by how many rows a rank has."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _PerShare()


class _Biasless(RoundedLinear):
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, None)


class Biasless(Rounded):
    """Forgets the bias."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Biasless()


class _Widening(RoundedLinear):
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x, bias).float()


class Widening(Rounded):
    """Gives float32 to a model of another type."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Widening()


class _Hoarding(RoundedLinear):
    def finish_load(self, layer: Any) -> None:
        layer.kept = layer.codes * layer.scales


class Hoarding(Rounded):
    """Keeps the dequantised weights, of which nobody who counts parameters learns."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Hoarding()


class _Mixing(RoundedLinear):
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        scale = x.abs().amax().clamp_min(1e-12) / 127 if x.numel() else 1.0
        return super().apply(layer, torch.round(x / scale) * scale, bias)


class Mixing(Rounded):
    """Rounds all rows of a step by one scale, in deterministic steps too."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Mixing()


class _Busy(RoundedLinear):
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x / x.abs().amax() * x.abs().amax(), bias)


class Busy(Rounded):
    """Fails for a rank that has no rows in a step."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return _Busy()


class _FirstShare(PlainExperts):
    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        def first(index: slice) -> slice:
            return slice(0, index.stop - index.start) if index.start and index.step is None else index

        slots = super().weight_slots(layer)
        return [replace(slot, index=tuple(first(index) for index in slot.index)) for slot in slots]


class FirstShare(Rounded):
    """Loads the first rank's share of experts on each rank."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _FirstShare()


class _Wandering(PlainExperts):
    def finish_load(self, layer: Any) -> None:
        layer.down.data = layer.down.data.clone()


class Wandering(Rounded):
    """Gives a parameter of experts another address once it is loaded."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _Wandering()


class _Leaving(PlainExperts):
    def rows(self, layer: Any) -> list[Tensor]:
        return super().rows(layer)[:1]


class Leaving(Rounded):
    """Leaves a matrix of an expert behind where the expert moves."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _Leaving()


class _Swapped(PlainExperts):
    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        return (layer.gate_up.flip(1), layer.down), (None, None)


class Swapped(Rounded):
    """Gives up before gate to what adds adapters."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _Swapped()


class _Unlike(PlainExperts):
    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        return super().apply(layer, dispatched) + dispatched.values


class Unlike(Rounded):
    """Its experts compute something else than the experts that were read."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _Unlike()


class _FirstRows(PlainEmbedding):
    def create(self, layer: Any) -> list[WeightSlot]:
        slots = super().create(layer)
        return [replace(slot, index=(slice(0, layer.spec.used),)) for slot in slots]


class FirstRows(Rounded):
    """Loads the first rows of a vocabulary on each rank."""

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        return _FirstRows()


class _Shrunk(PlainEmbedding):
    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        return super().rows(layer, ids) / 2


class Shrunk(Rounded):
    """Looks up other rows than it multiplies by."""

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        return _Shrunk()


class Restless(Rounded):
    """Names itself otherwise each time that it is built."""

    _numbers = count()

    @property
    def numerics(self) -> str:
        return f"rounded, {next(self._numbers)}"


class Routers(Rounded):
    """Rounds the weights of routers, too."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return RoundedLinear()


class _Elsewhere(RoundedLinear):
    def create(self, layer: Any) -> list[WeightSlot]:
        slots = super().create(layer)
        layer.scales = nn.Parameter(torch.empty(layer.spec.out_features, 1), requires_grad=False)
        return slots


class Elsewhere(Rounded):
    """Takes memory for the layers of other pipeline stages."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.exact else _Elsewhere()


class _Clipping(RoundedLinear):
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x.clamp_(-2, 2), bias)


class Clipping(Rounded):
    """Writes into the activations that it is given."""

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.exact else _Clipping()


class _OwnOnly(CodedExperts):
    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        return [slot for slot in super().weight_slots(layer) if slot.parameter is not None]


class OwnOnly(Coded):
    """Knows no tensors of the experts of other ranks."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _OwnOnly()


class _LlamaOnly(CodedExperts):
    def create(self, layer: Any) -> None:
        asked = layer.spec
        layer.spec = replace(asked, bias=False, weights_on_input=False)
        super().create(layer)
        layer.spec = asked

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        pair = self.dequantised(layer, dispatched.values.dtype)
        out: Tensor = layer.ops.fused_experts(dispatched.values, *pair, dispatched.weights, dispatched.slots)
        return out


class LlamaOnly(Coded):
    """Takes all experts for those of Llama's kind."""

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        return _LlamaOnly()
