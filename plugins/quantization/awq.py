"""AWQ: 4-bit codes minus zero points, times scales of groups of inputs; packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

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

from .columnwise import along_rows, group_columns, unused_biases
from .joined import by_parts
from .names import Names
from .packed import SCALES, PackedLinear
from .packed_experts import PackedExperts
from .packing import AWQ_ORDER, pack_nibbles
from .settings import name_list, require, require_tensors, whole_number
from .vocabulary import LinearHead


class Awq(Quantization):
    """What is left as it is are layers whose names contain one of `modules_to_not_convert`, or without codes."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        require("bits", config.get("bits", config.get("w_bit")), (4,))
        version = config.get("version", "gemm")
        require("version", version.lower() if isinstance(version, str) else version, ("gemm",))
        require("zero_point", config.get("zero_point", True), (True,))
        self._group = whole_number("group_size", config.get("group_size", config.get("q_group_size", 128)))
        self._ignored = Names(
            name_list("modules_to_not_convert", config.get("modules_to_not_convert")), setup.renames, parts=True
        )
        require_tensors("awq", setup.tensors, ".qweight")

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "awq"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        return by_parts(spec, self._group_of, AwqLinear)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        found = f"{prefix}.qweight" in self.setup.tensors
        return LinearHead(AwqLinear(self._group)) if found and spec.head else None

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        if self._group_of(f"{prefix}.0.{spec.names[0]}") is None:
            return None
        return PackedExperts(self._group, partial(awq_slots, self._group), ("qweight", "qzeros", "scales"))

    @property
    def numerics(self) -> str:
        return f"awq by groups of {self._group or 'all'} inputs"

    def _group_of(self, name: str) -> int | None:
        """The inputs of a group of the layer `name`, 0 for all; None where it is not quantised."""
        is_plain = self.setup.tensors and f"{name}.qweight" not in self.setup.tensors
        return None if is_plain or name in self._ignored else self._group


class AwqLinear(PackedLinear):
    """In frame's layout: codes are put into its order when they arrive."""

    def __init__(self, group: int) -> None:
        super().__init__(group, zeros=True)

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer, torch.float32)
        return awq_slots(self.group_size, layer, layer.spec) + unused_biases(layer.spec, layer.packed)


def awq_slots(group: int, held: Any, spec: LinearSpec) -> list[WeightSlot]:
    """The slots of a layer whose `packed`, `scales` and `zeros` are those of `held`."""

    def put_codes(rows: slice, codes: torch.Tensor) -> None:
        held.packed.data[rows] = pack_nibbles(codes)

    def put_zeros(rows: slice, codes: torch.Tensor) -> None:
        held.zeros.data[rows] = codes

    columns, groups = (spec.columns, spec.in_features), group_columns(spec, group)
    slots = along_rows("qweight", held.packed, spec, 4, columns, put_codes, AWQ_ORDER)
    slots += along_rows("qzeros", held.zeros, spec, 4, groups, put_zeros, AWQ_ORDER)
    return slots + WeightSlot.sharded("scales", held.scales, spec, 1, group, transposed=True, near=SCALES)
