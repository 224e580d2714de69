"""Routed experts whose weights stay in blocks; those that a step needs are given their values for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import Dispatched, ExpertMatrices
from frame.layers import PlainExperts, WeightSlot

from .blocks import dequantize
from .types import BY_NAME

_ALL = slice(None)


class PackedExperts(PlainExperts):
    """A parameter for each part, of the type `kinds`: uint8 [slots, rows, blocks, bytes], or plain where that is None.

    They are `layer.part_0`, … in the order of `spec.names`: gate, up, down.
    """

    def __init__(self, kinds: Sequence[str | None]) -> None:
        self._kinds = list(kinds)

    def create(self, layer: Any) -> None:
        device, layer.device = layer.device, torch.device("meta")
        try:
            super().create(layer)  # which checks the layer, and says what sizes it has
        finally:
            layer.device = device
        if layer.spec.bias:
            raise ValueError(f"{layer.prefix}: experts of GGUF files have no biases")
        down = layer.down
        inner = layer.gate_up.shape[1] // (len(layer.spec.names) - 1)
        layer.gate_up = layer.down = None
        for number, kind in enumerate(self._kinds):
            last = number == len(self._kinds) - 1
            slots, rows, columns = (len(down), *down.shape[1:]) if last else (len(down), inner, down.shape[1])
            setattr(layer, _name(number), _empty(layer, kind, slots, rows, columns))

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        spec = layer.spec
        mine = slice(layer.divided.rank * layer.width, (layer.divided.rank + 1) * layer.width)
        ends = [f"{part}.{(kind or 'weight').lower()}" for part, kind in zip(spec.names, self._kinds, strict=True)]
        others = sorted(set(range(spec.num_experts)).difference(layer.held))
        slots = [WeightSlot(f"{layer.prefix}.{expert}.{end}", (), None) for expert in others for end in ends]
        for number, (end, kind) in enumerate(zip(ends, self._kinds, strict=True)):
            last = number == len(ends) - 1
            sizes = (spec.hidden_size, spec.intermediate_size) if last else (spec.intermediate_size, spec.hidden_size)
            index: tuple[slice, ...] = (_ALL, mine) if last else (mine, _ALL)
            shape: tuple[int, ...] = sizes
            options: dict[str, Any] = {}
            if kind is not None:
                block = BY_NAME[kind]
                shape = (sizes[0], sizes[1] // block.values, block.num_bytes)
                index = (_ALL, _blocks(mine, block.values)) if last else index
                options = {"dtype": torch.uint8, "near": (20.0, 4.0)}
            for local, expert in enumerate(layer.held):
                name, region = f"{layer.prefix}.{expert}.{end}", (slice(local, local + 1),)
                slots.append(WeightSlot(name, shape, getattr(layer, _name(number)), index, region, **options))
        return slots

    def rows(self, layer: Any) -> list[Tensor]:
        return [getattr(layer, _name(number)) for number in range(len(self._kinds))]

    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        return super().matrices(self._shown(layer, None, dtype), dtype)

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        slots, first = dispatched.slots, layer.base
        if slots is None or layer.device.type != "cpu":  # elsewhere the host does not know which are needed
            return super().apply(self._shown(layer, None, dispatched.values.dtype), dispatched)
        used = torch.unique(slots)
        used = used[(used >= first) & (used < first + layer.num_slots)]
        if not len(used):
            return torch.zeros_like(dispatched.values)
        places = torch.searchsorted(used, slots.contiguous()).clamp_max(len(used) - 1)
        places = torch.where(used[places] == slots, places, -1).to(slots.dtype)
        shown = self._shown(layer, (used - first).long(), dispatched.values.dtype)
        return super().apply(shown, replace(dispatched, slots=places))

    def _shown(self, layer: Any, used: Tensor | None, dtype: torch.dtype) -> Any:
        """The layer with the weights of its slots `used`, None for all, in full."""
        parts = []
        for parameter, kind in zip(self.rows(layer), self._kinds, strict=True):
            some = parameter if used is None else parameter[used]
            parts.append(some.to(dtype) if kind is None else dequantize(some, kind, dtype))
        numbered = {} if used is None else {"base": 0, "num_all_slots": len(used)}
        return _Shown(layer, gate_up=torch.cat(parts[:-1], 1), down=parts[-1], **numbered)


class _Shown:
    """A layer of experts some of whose attributes are others."""

    def __init__(self, layer: Any, **others: Any) -> None:
        self._layer = layer
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _name(number: int) -> str:
    return f"part_{number}"


def _empty(layer: Any, kind: str | None, slots: int, rows: int, columns: int) -> Tensor:
    """The parameter of one part; raises `ValueError` where this rank's columns cut a block."""
    if kind is None:
        plain: Tensor = layer.empty(slots, rows, columns)
        return plain
    block = BY_NAME[kind]
    if columns % block.values:
        raise ValueError(
            f"{layer.prefix}: this rank holds {columns} columns of each expert, which cut blocks of {block.values} "
            f"({kind}); divide the model over fewer devices"
        )
    packed: Tensor = layer.empty(slots, rows, columns // block.values, block.num_bytes, dtype=torch.uint8)
    return packed


def _blocks(columns: slice, values: int) -> slice:
    """The blocks of some columns, which cut none."""
    return slice(columns.start // values, columns.stop // values)
