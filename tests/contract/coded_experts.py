"""A stored format of routed experts that a package may bring: eight bits with a scale for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import Dispatched, ExpertMatrices, ExpertMethod, ExpertSpec, Quantization
from frame.layers import WeightSlot
from frame.testing import QuantizationSuite

PARTS = ("gate_up", "down")
ENDS = ("codes", "scales")
TAGS = {"quantization_config": '{"quant_method": "coded"}'}


class CodedExperts(ExpertMethod):
    """`layer.gate_up` int8 [slots, 2 · width, H] and `layer.down` int8 [slots, H, width], with a scale for each row."""

    def create(self, layer: Any) -> None:
        spec = layer.spec
        if spec.bias or not spec.gated or spec.weights_on_input:
            raise ValueError(f"{layer.prefix}: experts must have gates, no biases, and no weights on their input")
        sizes = (2 * layer.width, spec.hidden_size), (spec.hidden_size, layer.width)
        for name, (rows, columns) in zip(PARTS, sizes, strict=True):
            setattr(layer, name, layer.empty(layer.num_slots, rows, columns, dtype=torch.int8))
            setattr(layer, f"{name}_scales", layer.empty(layer.num_slots, rows, 1, dtype=torch.float32))

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        spec, width = layer.spec, layer.width
        mine = slice(layer.divided.rank * width, (layer.divided.rank + 1) * width)  # this rank's inner features
        whole = slice(0, spec.hidden_size)
        gate, up, down = spec.names
        inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
        slots = []
        for slot, expert in enumerate(layer.held):
            places = (
                (gate, "gate_up", inner, (mine, whole), slice(0, width)),
                (up, "gate_up", inner, (mine, whole), slice(width, 2 * width)),
                (down, "down", outer, (whole, mine), whole),
            )
            for part, name, shape, index, rows in places:
                codes, scales = getattr(layer, name), getattr(layer, f"{name}_scales")
                tensor, region = f"{layer.prefix}.{expert}.{part}", (slice(slot, slot + 1), rows)
                slots += [
                    WeightSlot(f"{tensor}.codes", shape, codes, index, region, dtype=torch.int8),
                    WeightSlot(f"{tensor}.scales", (shape[0], 1), scales, index[:1], region, near=(0.001, 0.0005)),
                ]
        others = set(range(spec.num_experts)).difference(layer.held)
        names = [f"{layer.prefix}.{expert}.{part}.{end}" for expert in others for part in spec.names for end in ENDS]
        return slots + [WeightSlot(name, (), None) for name in names]

    def rows(self, layer: Any) -> list[Tensor]:
        return [getattr(layer, name + end) for name in PARTS for end in ("", "_scales")]

    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        return self.dequantised(layer, dtype), (None, None)

    def dequantised(self, layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gate_up, down = ((getattr(layer, name) * getattr(layer, f"{name}_scales")).to(dtype) for name in PARTS)
        return gate_up, down

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        x, gating = dispatched.values, layer.spec.gating
        pair = self.dequantised(layer, x.dtype)
        out: Tensor = layer.ops.fused_experts(x, *pair, dispatched.weights, dispatched.slots, gating=gating)
        return out


class Coded(Quantization):
    """Reads experts in this format and leaves all other layers."""

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "coded"

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        tensors = self.setup.tensors  # empty where weights are made up
        coded = not tensors or f"{prefix}.0.{spec.names[0]}.codes" in tensors
        return CodedExperts() if coded else None

    @property
    def numerics(self) -> str:
        return "int8 experts by rows, dequantised"


class TestCoded(QuantizationSuite):
    target = "tests.contract.coded_experts:Coded"
    tags = TAGS
