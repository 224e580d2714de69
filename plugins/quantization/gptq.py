"""GPTQ: codes of 2, 3, 4 or 8 bits minus zero points, times scales of groups of inputs; packed along the inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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

from .columnwise import along_columns, along_rows, group_columns, unused_biases
from .joined import by_parts
from .packed import SCALES, PackedLinear, all_groups, require_groups
from .packed_experts import PackedExperts
from .packing import pack_nibbles
from .scaled import WEIGHTS, ScaledLinear, Stored
from .settings import require, require_tensors, whole_number
from .vocabulary import LinearHead

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Scheme:
    """How a layer is stored: `group` inputs share a scale, 0: all; `ordered`: which these are, g_idx says.

    `move` is added to stored zero points.
    """

    bits: int
    group: int
    ordered: bool
    move: int


class Gptq(Quantization):
    """`dynamic` changes `bits`, `group_size`, `desc_act` of layers, or excludes them, by patterns of their names."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        format_ = config.get("checkpoint_format") or "gptq"
        require("checkpoint_format", format_, ("gptq", "gptq_v2"))
        self._move = 1 if format_ == "gptq" else 0
        self._scheme = self._read(config, Scheme(4, 128, False, self._move))
        self._has_head = bool(config.get("lm_head"))
        dynamic = config.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise ValueError(f"dynamic of the quantization_config must be an object, got {dynamic!r:.80}")
        self._dynamic: list[tuple[re.Pattern[str], Scheme | None]] = []
        for pattern, changes in dynamic.items():
            given = _pattern(pattern)
            if not isinstance(changes or {}, Mapping):
                raise ValueError(
                    f"dynamic of the quantization_config has for {pattern!r:.80} no object: {changes!r:.80}"
                )
            self._dynamic.append((given, None if pattern.startswith("-:") else self._read(changes or {}, self._scheme)))
        require_tensors("gptq", setup.tensors, ".qweight")

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "gptq"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        return by_parts(spec, self._scheme_of, _method, lambda scheme: scheme.ordered)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        stored = f"{prefix}.qweight" in self.setup.tensors if self.setup.tensors else self._has_head
        scheme = self._scheme_of(prefix) if stored and spec.head else None
        return None if scheme is None else LinearHead(_method(scheme))

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        scheme = self._scheme_of(f"{prefix}.0.{spec.names[0]}")
        if scheme is None:
            return None
        if scheme.bits == 8 or scheme.ordered:
            raise ValueError(f"{prefix}: gptq experts of 8 bits, or with desc_act, are not supported")
        ends = ("qweight", "qzeros", "scales", "g_idx")
        return PackedExperts(scheme.group, partial(_slots_of_expert, scheme), ends)

    @property
    def numerics(self) -> str:
        scheme = self._scheme
        return f"gptq of {scheme.bits} bits by groups of {scheme.group or 'all'} inputs"

    def _read(self, config: Mapping[str, Any], default: Scheme) -> Scheme:
        bits = config.get("bits", default.bits)
        require("bits", bits, _BITS)
        group = whole_number("group_size", config.get("group_size", default.group or -1))
        return Scheme(bits, group, bool(config.get("desc_act", default.ordered)) and group > 0, self._move)

    def _scheme_of(self, name: str) -> Scheme | None:
        """How the layer `name` is stored; None where it is not quantised."""
        if self.setup.tensors and f"{name}.qweight" not in self.setup.tensors:
            return None
        for pattern, scheme in self._dynamic:
            if pattern.match(name):
                return scheme
        return self._scheme


def _pattern(given: str) -> re.Pattern[str]:
    try:
        return re.compile(given.removeprefix("-:").removeprefix("+:"))
    except re.error as error:
        raise ValueError(f"dynamic of the quantization_config has the pattern {given!r:.80}: {error}") from None


def _method(scheme: Scheme) -> LinearMethod:
    return GptqBytes(scheme) if scheme.bits == 8 else GptqNibbles(scheme)


class GptqNibbles(PackedLinear):
    """Codes of up to four bits, each kept in four."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(scheme.group, zeros=True, ordered=scheme.ordered)
        self._scheme = scheme

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer, torch.float32)
        spec: LinearSpec = layer.spec

        def put(rows: slice, codes: Tensor) -> None:
            layer.packed.data[rows] = pack_nibbles(codes)

        def put_zeros(rows: slice, codes: Tensor) -> None:
            layer.zeros.data[rows] = codes + self._scheme.move & (1 << self._scheme.bits) - 1

        slots = along_columns("qweight", layer.packed, spec, self._scheme.bits, put)
        slots += _slots_of_groups(self._scheme, layer, all_groups(spec) if self.divided else spec, put_zeros)
        return slots + _slots_of_order(layer) + unused_biases(spec, layer.packed)


class GptqBytes(ScaledLinear):
    """Codes of eight bits, minus 128; with ordered groups columns are sorted by group, and x is read in that order."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(Stored(torch.int8, (1, scheme.group)))
        self._scheme = scheme

    def create(self, layer: Any) -> list[WeightSlot]:
        spec, scheme = layer.spec, self._scheme
        if scheme.ordered and spec.width != spec.in_features:
            raise ValueError(f"{spec.prefix}: gptq of 8 bits with desc_act is not divided over ranks; use 1 device")
        size = require_groups(spec, scheme.group)
        self.block = (1, size)
        layer.codes = layer.empty(spec.out_features, spec.width, dtype=torch.int8)
        layer.scales = layer.empty(spec.out_features, spec.width // size, dtype=torch.float32)
        layer.zeros = layer.empty(spec.out_features, spec.width // size, dtype=torch.int8)
        layer.input_scale = layer.order = layer.groups = None
        if scheme.ordered:
            layer.order = layer.empty(spec.width, dtype=torch.int32)
            layer.order.data.copy_(torch.arange(spec.width, dtype=torch.int32, device=layer.device))
            layer.groups = layer.empty(spec.width, dtype=torch.int32)
            layer.groups.data.copy_(layer.order // size)

        def put(rows: slice, codes: Tensor) -> None:
            layer.codes.data[rows] = (codes.to(torch.int16) - 128).to(torch.int8)

        def put_zeros(rows: slice, codes: Tensor) -> None:
            moved = codes + scheme.move  # modulo 256
            layer.zeros.data[rows] = (moved.to(torch.int16) - 128).to(torch.int8)

        slots = along_columns("qweight", layer.codes, spec, 8, put)
        slots += _slots_of_groups(scheme, layer, spec, put_zeros)
        return slots + _slots_of_order(layer) + unused_biases(spec, layer.codes)

    def begin_load(self, layer: Any) -> None:
        if layer.order is not None:
            self._reorder(layer, torch.argsort(layer.order))
            layer.order.copy_(torch.arange(len(layer.order), device=layer.device))

    def finish_load(self, layer: Any) -> None:
        if layer.order is not None:
            layer.order.copy_(torch.argsort(layer.groups, stable=True))
            self._reorder(layer, layer.order)

    @staticmethod
    def _reorder(layer: Any, order: Tensor) -> None:
        for some in layer.codes.split(512):
            some.copy_(some[:, order.long()])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().apply(layer, x if layer.order is None else x.index_select(-1, layer.order), bias)


def _slots_of_groups(scheme: Scheme, held: Any, spec: LinearSpec, put: Any) -> list[WeightSlot]:
    """Of zero points [K / g, N · bits / 32] and scales [K / g, N]."""
    near = SCALES if scheme.bits < 8 else (WEIGHTS / 128, WEIGHTS / 512)
    slots = along_rows("qzeros", held.zeros, spec, scheme.bits, group_columns(spec, scheme.group), put)
    return slots + WeightSlot.sharded("scales", held.scales, spec, 1, scheme.group, transposed=True, near=near)


def _slots_of_order(layer: Any) -> list[WeightSlot]:
    """Of g_idx, which is there and says nothing where groups are runs of columns."""
    spec: LinearSpec = layer.spec
    if layer.groups is None:
        return [WeightSlot(f"{part.name}.g_idx", (), None) for part in spec.rows]
    (part,) = spec.rows
    slot = WeightSlot(f"{part.name}.g_idx", (spec.in_features,), layer.groups, (spec.columns,), optional=True)
    return [replace(slot, dtype=torch.int32)]


def _slots_of_expert(scheme: Scheme, held: Any, spec: LinearSpec) -> list[WeightSlot]:
    def put(rows: slice, codes: Tensor) -> None:
        held.packed.data[rows] = pack_nibbles(codes)

    def put_zeros(rows: slice, codes: Tensor) -> None:
        held.zeros.data[rows] = codes + scheme.move & (1 << scheme.bits) - 1

    slots = along_columns("qweight", held.packed, spec, scheme.bits, put)
    slots += _slots_of_groups(scheme, held, spec, put_zeros)
    return slots + [WeightSlot(f"{part.name}.g_idx", (), None) for part in spec.rows]
