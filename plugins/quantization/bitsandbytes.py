"""bitsandbytes: 4-bit codes of sixteen numbers (nf4, fp4) by blocks of inputs, and 8-bit integers by rows.

Weights are dequantised; inputs with large values (llm_int8_threshold) are not computed apart, as the library does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import (
    EmbeddingMethod,
    EmbeddingSpec,
    ExpertMethod,
    ExpertSpec,
    LinearMethod,
    LinearSpec,
    Quantization,
    QuantizationSetup,
)
from frame.layers import WeightSlot

from .bitsandbytes_4bit import FourBitLinear, StoredCodes
from .joined import by_parts
from .names import Names
from .scaled import WEIGHTS, ScaledLinear, Stored
from .settings import name_list, require
from .vocabulary import LinearHead

_ROWS = StoredCodes(0, False, "int8")


class Bitsandbytes(Quantization):
    """Layers are quantised that have the statistics of it; of made-up weights all but `llm_int8_skip_modules`."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        self._is_4bit = bool(config.get("load_in_4bit", config.get("_load_in_4bit")))
        if self._is_4bit == bool(config.get("load_in_8bit", config.get("_load_in_8bit"))):
            raise ValueError("the quantization_config of bitsandbytes must say one of load_in_4bit and load_in_8bit")
        self._type = config.get("bnb_4bit_quant_type", "fp4")
        require("bnb_4bit_quant_type", self._type, ("nf4", "fp4"))
        self._is_nested = bool(config.get("bnb_4bit_use_double_quant"))
        self._ignored = Names(name_list("llm_int8_skip_modules", config.get("llm_int8_skip_modules")), setup.renames)
        end = ".weight.quant_map" if self._is_4bit else ".SCB"
        if setup.tensors and not any(name.endswith(end) for name in setup.tensors):
            raise ValueError(
                f"the quantization_config says bitsandbytes of {4 if self._is_4bit else 8} bits, but no tensor of the "
                f"checkpoint ends in {end!r}"
            )

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "bitsandbytes"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        return by_parts(spec, self._stored, self._method)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        stored = self._stored(prefix) if spec.head and self.setup.tensors else None
        return None if stored is None else LinearHead(self._method(stored))

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        name = f"{prefix}.0.{spec.names[0]}"
        if self.setup.tensors and self._stored(name) is not None:
            raise ValueError(f"{prefix}: routed experts that bitsandbytes quantised are not supported")
        return None

    @property
    def numerics(self) -> str:
        return f"bitsandbytes {self._type if self._is_4bit else 'int8'} weights"

    def _method(self, stored: StoredCodes) -> LinearMethod:
        return EightBitLinear() if stored.type == "int8" else FourBitLinear(stored, self.setup.tensors)

    def _stored(self, name: str) -> StoredCodes | None:
        """How the tensor "NAME.weight" is stored; None where it is not quantised."""
        tensors = self.setup.tensors
        if not tensors:
            if name in self._ignored:
                return None
            return StoredCodes(64, self._is_nested, self._type) if self._is_4bit else _ROWS
        if f"{name}.SCB" in tensors:
            return _ROWS
        weight, scales = tensors.get(f"{name}.weight"), tensors.get(f"{name}.weight.absmax")
        if weight is None or scales is None:
            return None
        block = weight.shape[0] * 2 // max(1, scales.shape[0])
        return StoredCodes(block, scales.dtype == torch.uint8, self._type)


class EightBitLinear(ScaledLinear):
    """w = code · SCB / 127, SCB being the largest value of a row."""

    def __init__(self) -> None:
        super().__init__(Stored(torch.int8, (1, 0), scale="SCB", flat=True))

    def create(self, layer: Any) -> list[WeightSlot]:
        def take(region: tuple[slice, ...], piece: Tensor) -> None:
            layer.scales.data[region] = piece[:, None].float() / 127

        slots = super().create(layer)
        for place, slot in enumerate(slots):
            if slot.name.endswith(".SCB"):
                slots[place] = replace(slot, take=partial(take, slot.region), near=(WEIGHTS, WEIGHTS / 4))
        for part in layer.spec.rows:
            name = f"{part.name}.weight_format"
            slot = WeightSlot(name, (), layer.codes, dtype=torch.uint8, optional=True, take=partial(_by_rows, name))
            slots.append(slot)
        return slots


def _by_rows(name: str, piece: Tensor) -> None:
    if bool(piece.any()):
        raise ValueError(f"{name} is {int(piece.max())}: frame reads 8-bit weights in rows (0)")
