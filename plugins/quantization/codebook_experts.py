"""Routed experts of 4-bit floats: of mxfp4 files, two tensors for all experts; of nvfp4 files, three for each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from frame.layers import WeightSlot
from frame.ops import CodedWeights

from .codebook import FP4, Floats, float_slots
from .experts import PARTS, CodedExperts, elsewhere, linears

_ALL = slice(None)


class CodebookExperts(CodedExperts):
    """`gate_up` and `down` are nibbles int32 [slots, N, K / 8] with scales [slots, N, K / g].

    The columns of `down` are whole groups around those of this rank, so that ranks may share one. With numbers of their
    own `gate_up_numbers` and `down_numbers` are float32 [slots, N, 1].
    """

    def __init__(self, kind: Floats) -> None:
        super().__init__(None, (1, kind.group))
        self._kind = kind
        self._lead = 0

    def allocate(self, layer: Any, name: str, slots: int, rows: int, columns: int) -> None:
        group = self._kind.group
        first = layer.divided.rank * layer.width if name == "down" else 0
        if name == "down":
            self._lead = first % group
        elif columns % group:
            raise ValueError(f"{layer.prefix}: groups of {group} columns do not divide the {columns} of {name}")
        groups = -(-(first + columns) // group) - first // group
        self.blocks[name] = (1, group)
        setattr(layer, name, layer.empty(slots, rows, groups * group // 8, dtype=torch.int32))
        setattr(layer, f"{name}_scales", layer.empty(slots, rows, groups, dtype=self._kind.scale_dtype))
        if self._kind.number:
            setattr(layer, f"{name}_numbers", layer.empty(slots, rows, 1, dtype=torch.float32))

    def create(self, layer: Any) -> None:
        super().create(layer)
        layer.table = layer.empty(16, dtype=torch.float32)

    def begin_load(self, layer: Any) -> None:
        layer.table.data.copy_(torch.tensor(FP4))

    def rows(self, layer: Any) -> list[Tensor]:
        numbers = [getattr(layer, f"{name}_numbers") for name in PARTS] if self._kind.number else []
        return [*super().rows(layer), *numbers]

    def stored(self, layer: Any, name: str) -> CodedWeights:
        numbers = getattr(layer, f"{name}_numbers", None)
        found, columns = super().stored(layer, name), None
        if name == "down" and layer.width < 8 * found.codes.shape[2]:  # other ranks' columns lie in the first or last
            columns = slice(self._lead, self._lead + layer.width)
        return replace(found, table=layer.table, numbers=numbers, columns=columns, is_float4=True)


class JoinedFloatExperts(CodebookExperts):
    """Two tensors for all experts: NAME_blocks uint8 [E, N, K / g, g / 2] and NAME_scales uint8 [E, N, K / g].

    Rows of gate and up take turns, where the model's own do.
    """

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        slots = self.bias_slots(layer)
        spec, width, group = layer.spec, layer.width, self._kind.group
        *first, down = spec.names
        inner = "_".join([*(part.removesuffix("_proj") for part in first[:-1]), first[-1]])
        names = [f"{layer.prefix}.{name}" for name in spec.joined or (inner, down)]
        if not layer.held:
            ends = (self._kind.codes, self._kind.scale)
            return slots + [WeightSlot(name + end, (), None) for name in names for end in ends]
        start, total = layer.divided.rank * width, layer.width * layer.divided.size
        hidden = (spec.num_experts, spec.hidden_size, -(-total // group))
        groups = slice(start // group, -(-(start + width) // group))
        for local, expert in enumerate(layer.held):
            here, there = slice(local, local + 1), slice(expert, expert + 1)
            for half in range(len(first)):
                lines = slice(half * total + start, half * total + start + width)
                if spec.interleaved:
                    lines = slice(start * len(first) + half, (start + width - 1) * len(first) + half + 1, len(first))
                shape = (spec.num_experts, len(first) * total, spec.hidden_size // group)
                region = (here, slice(half * width, (half + 1) * width))
                slots += self._pair(names[0], shape, (there, lines, _ALL), layer.gate_up, layer.gate_up_scales, region)
            slots += self._pair(names[1], hidden, (there, _ALL, groups), layer.down, layer.down_scales, (here,))
        return slots

    def _pair(
        self, name: str, shape: tuple[int, ...], index: tuple[slice, ...], codes: Tensor, scales: Tensor, region: Any
    ) -> list[WeightSlot]:
        kind, dtype = self._kind, torch.uint8
        put = partial(_put_blocks, codes, region)
        return [
            WeightSlot(name + kind.codes, (*shape, kind.group // 2), codes, index, region, dtype=dtype, take=put),
            WeightSlot(name + kind.scale, shape, scales, index, region, dtype=dtype, near=kind.scales_near),
        ]


class FloatExperts(CodebookExperts):
    """Three tensors of codes for each expert, and as many of scales and numbers."""

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        if self._lead or layer.width % self._kind.group:
            raise ValueError(
                f"{layer.prefix}: this rank holds {layer.width} inputs of down, which cut groups of "
                f"{self._kind.group}; divide the model over fewer devices"
            )
        kind, slots = self._kind, self.bias_slots(layer)
        for local, name, first, spec in linears(layer):
            rows = slice(first, first + spec.out_features)
            held = [getattr(layer, f"{name}{end}", None) for end in ("", "_scales", "_numbers")]
            views = [None if one is None else one.data[local, rows] for one in held]
            slots += float_slots(kind, SimpleNamespace(packed=views[0], scales=views[1], numbers=views[2]), spec)
        ends = [kind.codes, kind.scale, *([kind.number] if kind.number else []), *kind.unread]
        return slots + [slot for end in ends for slot in elsewhere(layer, end)]


def _put_blocks(codes: Tensor, region: tuple[slice, ...], piece: Tensor) -> None:
    codes.data[region] = piece.contiguous().view(torch.int32).flatten(-2)
