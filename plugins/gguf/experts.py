"""Routed experts whose weights stay in codes: a processor multiplies by them, others are given their values for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import Dispatched, ExpertMatrices
from frame.layers import PlainExperts, WeightSlot
from frame.ops import RowParts, gated

from .held import held_as
from .types import BY_NAME

_ALL = slice(None)


class PackedExperts(PlainExperts):
    """The parameters of `Held` with an axis of slots before, for each part; or a plain one [slots, rows, columns].

    `kinds` are the types of the parts in the order of `spec.names`: gate, up, down; None for a plain part. The
    parameters of part i are `layer.part_i_NAME`, that of a plain one `layer.part_i`.
    """

    def __init__(self, kinds: Sequence[str | None]) -> None:
        self._kinds = list(kinds)
        self._held = [None if kind is None else held_as(kind) for kind in kinds]
        self._names: list[list[str]] = [[] for _ in kinds]

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
        for number, held in enumerate(self._held):
            last = number == len(self._kinds) - 1
            slots, rows, columns = (len(down), *down.shape[1:]) if last else (len(down), inner, down.shape[1])
            if held is None:
                setattr(layer, _name(number), layer.empty(slots, rows, columns))
                continue
            _require_whole_blocks(layer, held.kind, columns)
            made = _Made(layer, slots)
            held.create(made, rows, columns)
            self._names[number] = list(made.parameters)
            for name, parameter in made.parameters.items():
                setattr(layer, f"{_name(number)}_{name}", parameter)

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        spec = layer.spec
        mine = slice(layer.divided.rank * layer.width, (layer.divided.rank + 1) * layer.width)
        ends = [f"{part}.{(kind or 'weight').lower()}" for part, kind in zip(spec.names, self._kinds, strict=True)]
        others = sorted(set(range(spec.num_experts)).difference(layer.held))
        slots = [WeightSlot(f"{layer.prefix}.{expert}.{end}", (), None) for expert in others for end in ends]
        for number, (end, held) in enumerate(zip(ends, self._held, strict=True)):
            last = number == len(ends) - 1
            sizes = (spec.hidden_size, spec.intermediate_size) if last else (spec.intermediate_size, spec.hidden_size)
            index: tuple[slice, ...] = (_ALL, mine) if last else (mine, _ALL)
            shape: tuple[int, ...] = sizes
            if held is not None:
                block = BY_NAME[held.kind]
                shape = (sizes[0], sizes[1] // block.values, block.num_bytes)
                index = (_ALL, _blocks(mine, block.values)) if last else index
            for local, expert in enumerate(layer.held):
                name, parameter = f"{layer.prefix}.{expert}.{end}", self._parameters(layer, number)[0]
                options: dict[str, Any] = {"region": (slice(local, local + 1),)}
                if held is not None:
                    take = partial(self._put, layer, number, local)
                    options |= {"dtype": torch.uint8, "near": held.near, "take": take}
                slots.append(WeightSlot(name, shape, parameter, index, **options))
        return slots

    def rows(self, layer: Any) -> list[Tensor]:
        return [one for number in range(len(self._kinds)) for one in self._parameters(layer, number)]

    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        return super().matrices(self._shown(layer, dtype), dtype)

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        if dispatched.counts is None:
            return super().apply(layer, dispatched)
        return super().apply(self._shown(layer, dispatched.values.dtype), dispatched)

    def multiply(self, layer: Any, values: Tensor, weights: Tensor, slots: Tensor, **how: Any) -> Tensor:
        if layer.device.type != "cpu":  # the host does not know which experts are needed
            return super().multiply(self._shown(layer, values.dtype), values, weights, slots, **how)
        if layer.ops.invariant:
            return self._multiply_chosen(layer, values, weights, slots, how)
        out, first, gating = torch.zeros_like(values), how["first"], how["gating"]
        for slot in torch.unique(slots).tolist():
            if not first <= slot < first + layer.num_slots:
                continue
            token, choice = torch.where(slots == slot)
            x = values if len(token) == len(values) == 1 else values[token]
            inner = [self._product(layer, number, slot - first, x) for number in range(len(self._kinds) - 1)]
            value = self._product(layer, len(inner), slot - first, gated(torch.cat(inner, -1), gating))
            out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
        _tell(how.get("parts"), out)
        return out

    def _multiply_chosen(
        self, layer: Any, values: Tensor, weights: Tensor, slots: Tensor, how: dict[str, Any]
    ) -> Tensor:
        """`multiply` by the values of the experts that are chosen."""
        first = how["first"]
        used = torch.unique(slots)
        used = used[(used >= first) & (used < first + layer.num_slots)]
        if not len(used):
            out = torch.zeros_like(values)
            _tell(how.get("parts"), out)
            return out
        places = torch.searchsorted(used, slots.contiguous()).clamp_max(len(used) - 1)
        places = torch.where(used[places] == slots, places, -1).to(slots.dtype)
        shown = self._shown(layer, values.dtype, (used - first).long())
        return super().multiply(shown, values, weights, places, **{**how, "first": 0, "of_all": len(used)})

    def _parameters(self, layer: Any, number: int) -> list[Tensor]:
        names = self._names[number]
        return [getattr(layer, f"{_name(number)}_{name}") for name in names] or [getattr(layer, _name(number))]

    def _put(self, layer: Any, number: int, local: int, piece: Tensor) -> None:
        """Takes the blocks [rows, blocks, bytes] of a part of an expert."""
        if (held := self._held[number]) is not None:
            held.put(self._expert(layer, number, local), slice(0, len(piece)), piece)

    def _expert(self, layer: Any, number: int, local: int) -> _Shown:
        """A layer with the parameters of one expert's part."""
        parameters = zip(self._names[number], self._parameters(layer, number), strict=True)
        return _Shown(layer, **{name: parameter.data[local] for name, parameter in parameters})

    def _product(self, layer: Any, number: int, local: int, x: Tensor) -> Tensor:
        """x Wᵀ of a part of one expert."""
        held = self._held[number]
        if held is None:
            plain: Tensor = layer.ops.linear(x, getattr(layer, _name(number))[local])
            return plain
        return held.apply(self._expert(layer, number, local), x, None)

    def _shown(self, layer: Any, dtype: torch.dtype, used: Tensor | None = None) -> Any:
        """The layer with the weights of its slots `used`, None for all, in full."""
        parts = []
        for number, held in enumerate(self._held):
            parameters = [one.data if used is None else one.data[used] for one in self._parameters(layer, number)]
            if held is None:
                parts.append(parameters[0].to(dtype))
                continue
            named = zip(self._names[number], parameters, strict=True)
            joined = _Shown(layer, **{name: parameter.flatten(0, 1) for name, parameter in named})
            parts.append(held.values(joined, _ALL, dtype).unflatten(0, (len(parameters[0]), -1)))
        return _Shown(layer, gate_up=torch.cat(parts[:-1], 1), down=parts[-1])


class _Made:
    """Stands for the layer of one expert while parameters are made, which get an axis of slots before."""

    def __init__(self, layer: Any, slots: int) -> None:
        self.__dict__.update(_layer=layer, _slots=slots, parameters={})

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        found: Tensor = self._layer.empty(self._slots, *shape, dtype=dtype)
        return found

    def __getattr__(self, name: str) -> Any:
        return self.parameters[name]

    def __setattr__(self, name: str, value: Tensor) -> None:
        self.parameters[name] = value


class _Shown:
    """A layer of experts some of whose attributes are others."""

    def __init__(self, layer: Any, **others: Any) -> None:
        self._layer = layer
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _name(number: int) -> str:
    return f"part_{number}"


def _require_whole_blocks(layer: Any, kind: str, columns: int) -> None:
    """Raises `ValueError` where this rank's columns cut a block."""
    if columns % BY_NAME[kind].values:
        raise ValueError(
            f"{layer.prefix}: this rank holds {columns} columns of each expert, which cut blocks of "
            f"{BY_NAME[kind].values} ({kind}); divide the model over fewer devices"
        )


def _tell(parts: RowParts | None, out: Tensor) -> None:
    """Says that all parts of the result are there."""
    if parts is not None:
        for rows in parts.rows:
            parts.done(out, rows)


def _blocks(columns: slice, values: int) -> slice:
    """The blocks of some columns, which cut none."""
    return slice(columns.start // values, columns.stop // values)
