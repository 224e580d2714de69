"""Routed experts of nibbles with zero points, whose slots a format makes as it makes those of linear layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearSpec
from frame.layers import WeightSlot
from frame.ops import CodedWeights

from .experts import PARTS, CodedExperts, elsewhere, linears

#: Makes the slots of a linear layer whose `packed`, `scales` and `zeros` are those of what it is given.
SlotMaker = Callable[[Any, LinearSpec], list[WeightSlot]]


class PackedExperts(CodedExperts):
    """Nibbles [slots, N, K / 8], float32 scales and uint8 zero points [slots, N, K / g]; g is 0 for all columns.

    `ends` are those of the names of an expert's tensors.
    """

    def __init__(self, group: int, make: SlotMaker, ends: tuple[str, ...]) -> None:
        super().__init__(None, (1, group))
        self._make, self._ends = make, ends

    def allocate(self, layer: Any, name: str, slots: int, rows: int, columns: int) -> None:
        self.blocks[name] = self._block_for(layer, name, rows, columns)
        groups = columns // self.blocks[name][1]
        setattr(layer, name, layer.empty(slots, rows, columns // 8, dtype=torch.int32))
        setattr(layer, f"{name}_scales", layer.empty(slots, rows, groups, dtype=torch.float32))
        setattr(layer, f"{name}_zeros", layer.empty(slots, rows, groups, dtype=torch.uint8))

    def rows(self, layer: Any) -> list[Tensor]:
        return [*super().rows(layer), *(getattr(layer, f"{name}_zeros") for name in PARTS)]

    def stored(self, layer: Any, name: str) -> CodedWeights:
        return replace(super().stored(layer, name), zeros=getattr(layer, f"{name}_zeros"))

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        slots = self.bias_slots(layer)
        for local, name, first, spec in linears(layer):
            rows = slice(first, first + spec.out_features)
            views = [getattr(layer, f"{name}{end}").data[local, rows] for end in ("", "_scales", "_zeros")]
            slots += self._make(SimpleNamespace(packed=views[0], scales=views[1], zeros=views[2]), spec)
        return slots + [slot for end in self._ends for slot in elsewhere(layer, end)]
