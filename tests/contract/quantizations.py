"""A format of weights that a package may bring: eight bits with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearMethod, LinearSpec, Quantization
from frame.layers import WeightSlot
from frame.testing import QuantizationSuite


class RoundedLinear(LinearMethod):
    """`layer.codes` int8 [out, in] and `layer.scales` float32 [out, 1]: w = code · scale."""

    def create(self, layer: Any) -> list[WeightSlot]:
        spec = layer.spec
        layer.codes = layer.empty(spec.out_features, spec.width, dtype=torch.int8)
        layer.scales = layer.empty(spec.out_features, 1, dtype=torch.float32)
        slots, start = [], 0
        for part in spec.rows:
            rows = slice(start, start + part.count)
            taken = slice(part.start, part.start + part.count), spec.columns
            slots.append(
                WeightSlot(
                    f"{part.name}.weight",
                    (part.total, spec.in_features),
                    layer.codes,
                    taken,
                    take=partial(self.round, layer, rows),
                )
            )
            start = rows.stop
        return slots

    def round(self, layer: Any, rows: slice, piece: Tensor) -> None:
        """Puts the rows of one tensor into place; it is freed when this returns."""
        largest = piece.float().abs().amax(1, keepdim=True).clamp_min(1e-12)
        layer.scales[rows] = largest / 127
        layer.codes[rows] = torch.round(piece.float() * (127 / largest)).to(torch.int8)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = (layer.codes * layer.scales).to(x.dtype)
        out: Tensor = layer.ops.linear(x, weight, bias)
        return out


class Rounded(Quantization):
    """Rounds the weights of linear layers while they load."""

    online = True

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return False

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.exact or spec.transposed else RoundedLinear()

    @property
    def numerics(self) -> str:
        return "rounded int8, dequantised"


class TestRounded(QuantizationSuite):
    target = "tests.contract.quantizations:Rounded"
