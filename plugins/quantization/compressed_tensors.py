"""compressed-tensors, as llm-compressor writes it: fp8 and int8 weights, and packed ones of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import (
    AttentionSpec,
    CacheQuantization,
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

from .codebook import FloatLinear, Floats, nvfp4
from .codebook_experts import FloatExperts
from .experts import StoredExperts
from .joined import by_parts
from .names import Names
from .packed import SCALES, PackedLinear, all_groups, with_take, zeros_by_rows
from .packing import unpack
from .scaled import ScaledLinear, Stored, exponent_type
from .vocabulary import LinearHead

_MXFP8 = "mxfp8-quantized"
_READ = (
    "float-quantized, int-quantized, naive-quantized, mxfp8-quantized and pack-quantized weights of 8 bits, "
    "pack-quantized ones of 4, and 4-bit floats (nvfp4-pack-quantized, mxfp4-pack-quantized)"
)
#: Formats of 4-bit floats: how they are stored, and the strategy of their groups.
_FLOATS = {
    "nvfp4-pack-quantized": (
        nvfp4(
            "weight_packed", "weight_scale", "weight_global_scale", divides=True,
            unread=("input_global_scale", "weight_zero_point"),
        ),
        "tensor_group",
    ),
    "mxfp4-pack-quantized": (Floats("weight_packed", "weight_scale", 32, torch.uint8), "group"),
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """How the layers of a config group are stored."""

    format: str
    type: str
    num_bits: int
    strategy: str
    group_size: int
    block: tuple[int, int]
    symmetric: bool
    ordered: bool
    static_inputs: bool
    rounds_inputs: bool
    exponents: torch.dtype | None = None

    @property
    def is_packed(self) -> bool:
        """Whether codes are packed into words."""
        return self.format == "pack-quantized"


class CompressedTensors(Quantization):
    """The first config group counts that names a layer, that has a pattern for it, or that targets its class."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        for name in ("sparsity_config", "transform_config"):
            if (config.get(name) or {}).get("format", name) not in ("dense", name) or config.get("transform_config"):
                raise ValueError(f"{name} of the quantization_config is not supported: {config.get(name)!r:.80}")
        self._ignored = Names(config.get("ignore") or (), setup.renames)
        groups = config.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise ValueError(f"config_groups of the quantization_config must be an object, got {groups!r:.80}")
        self._groups = [
            (list(group.get("targets") or ()), _scheme(name, group, str(config.get("format"))))
            for name, group in groups.items()
        ]
        self._cache = config.get("kv_cache_scheme")

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "compressed-tensors"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        return by_parts(spec, self._scheme_of, _linear, partial(_stands_alone, spec))

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        scheme = self._scheme_of(prefix) if spec.head else None
        return None if scheme is None else LinearHead(_linear(scheme))

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        scheme = self._scheme_of(f"{prefix}.0.{spec.names[0]}")
        if scheme is None:
            return None
        if scheme.format in _FLOATS:
            return FloatExperts(_FLOATS[scheme.format][0])
        if not scheme.symmetric or scheme.ordered or (scheme.is_packed and scheme.num_bits != 4):
            raise ValueError(f"{prefix}: experts with zero points, ordered groups or packed bytes are not supported")
        if scheme.is_packed:
            return StoredExperts(
                None, (1, scheme.group_size), ("weight_packed", "weight_scale"), ignored=("weight_shape",)
            )
        stored = _stored(scheme)
        return StoredExperts(
            stored.dtype,
            stored.block,
            ("weight", "weight_scale"),
            per_tensor=not stored.block[0],
            ignored=("input_scale",),
            exponents=stored.exponents,
            rounds=stored.rounds,
        )

    def cache(self, prefix: str, spec: AttentionSpec) -> CacheQuantization | None:
        scheme = self._cache
        if not scheme:
            return None
        strategy = scheme.get("strategy")
        if strategy not in ("tensor", "attn_head") or scheme.get("num_bits") != 8 or scheme.get("type") != "float":
            raise ValueError(
                f"kv_cache_scheme of the quantization_config: {scheme.get('type')} of {scheme.get('num_bits')} bits by "
                f"{strategy} is not supported; give --kv-cache-dtype"
            )
        return CacheQuantization(torch.float8_e4m3fn)

    @property
    def numerics(self) -> str:
        return "compressed-tensors " + ", ".join(
            f"{scheme.format} {scheme.type}{scheme.num_bits} by {scheme.strategy}" for _, scheme in self._groups
        )

    def _scheme_of(self, name: str) -> Scheme | None:
        if name in self._ignored:
            return None
        for of_targets in (_by_name, _by_class):
            for targets, scheme in self._groups:
                if of_targets(targets, name, self.setup.renames):
                    found = exponent_type(self.setup.tensors, f"{name}.weight_scale") or scheme.exponents
                    return replace(scheme, exponents=found)
        return None


def _by_name(targets: list[str], name: str, renames: Any) -> bool:
    return name in Names([target for target in targets if target != "Linear"], renames)


def _by_class(targets: list[str], name: str, renames: Any) -> bool:
    return "Linear" in targets


def _scheme(name: str, group: Mapping[str, Any], file_format: str) -> Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    block = weights.get("block_structure") or (0, 0)
    scheme = Scheme(
        format=str(group.get("format") or file_format),
        type=str(weights.get("type", "int")),
        num_bits=int(weights.get("num_bits") or 0),
        strategy=str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")),
        group_size=max(0, int(weights.get("group_size") or 0)),
        block=(int(block[0]), int(block[1])),
        symmetric=bool(weights.get("symmetric", True)),
        ordered=weights.get("actorder") in ("group", True),
        static_inputs=bool(inputs) and inputs.get("dynamic") is False,
        rounds_inputs=bool(inputs),
        exponents=torch.uint8 if str(group.get("format") or file_format) == _MXFP8 else None,
    )
    strategies: tuple[str, ...] = ("group", "channel") if scheme.is_packed else ("tensor", "channel", "group", "block")
    kinds = {"float-quantized": ("float", (8,)), "int-quantized": ("int", (8,)), "pack-quantized": ("int", (4, 8))}
    kinds[_MXFP8] = ("float", (8,) if scheme.group_size == 32 else ())
    kinds["naive-quantized"] = (scheme.type if scheme.type in ("float", "int") else "int", (8,))
    if scheme.format in _FLOATS and scheme.symmetric and scheme.group_size in (0, _FLOATS[scheme.format][0].group):
        kinds[scheme.format], strategies = ("float", (4,)), (_FLOATS[scheme.format][1],)
    kind, bits = kinds.get(scheme.format, ("", ()))
    if (scheme.type, scheme.num_bits in bits, scheme.strategy in strategies) != (kind, True, True):
        raise ValueError(
            f"{name} of the quantization_config is {scheme.format} {scheme.type} of {scheme.num_bits} bits by "
            f"{scheme.strategy}; frame reads: {_READ}"
        )
    return scheme


def _stands_alone(spec: LinearSpec, scheme: Scheme) -> bool:
    """Whether the tensors of a layer cannot share one product: their columns or their blocks differ."""
    return scheme.ordered or (bool(scheme.block[0]) and any(part.count % scheme.block[0] for part in spec.rows[:-1]))


def _linear(scheme: Scheme) -> LinearMethod:
    if scheme.format in _FLOATS:
        return FloatLinear(_FLOATS[scheme.format][0])
    if not scheme.is_packed:
        return _Scaled(_stored(scheme))
    return (_Nibbles if scheme.num_bits == 4 else _Bytes)(scheme)


def _stored(scheme: Scheme) -> Stored:
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, scheme.group_size), "block": scheme.block}
    return Stored(
        torch.float8_e4m3fn if scheme.type == "float" else torch.int8,
        blocks[scheme.strategy],
        input_scale="input_scale" if scheme.static_inputs else "",
        zeros="" if scheme.symmetric else "weight_zero_point",
        rounds=scheme.rounds_inputs,
        exponents=scheme.exponents,
    )


class _Scaled(ScaledLinear):
    def create(self, layer: Any) -> list[WeightSlot]:
        unread = () if self.stored.zeros else ("weight_zero_point",)
        return super().create(layer) + _unread(layer, "input_zero_point", *unread)


class _Nibbles(PackedLinear):
    """Codes are in frame's order, plus 8; zero points are packed along rows."""

    def __init__(self, scheme: Scheme) -> None:
        group = scheme.group_size if scheme.strategy == "group" else 0
        super().__init__(group, zeros=not scheme.symmetric, ordered=scheme.ordered)

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer, torch.float32)
        spec: LinearSpec = layer.spec
        scaled = all_groups(spec) if self.divided else spec
        units = self.scale_units(layer)
        slots = WeightSlot.sharded("weight_packed", layer.packed, spec, 1, 8, dtype=torch.int32)
        slots += WeightSlot.sharded("weight_scale", layer.scales, scaled, 1, units, near=SCALES)
        if layer.zeros is not None:
            zeros = WeightSlot.sharded("weight_zero_point", layer.zeros, scaled, 8, units, dtype=torch.int32)
            slots += with_take(zeros, lambda rows, piece: zeros_by_rows(layer, rows.start * 8, 4, 0, piece))
        unread = ["weight_shape"] + ["weight_zero_point"] * (layer.zeros is None)
        if layer.groups is not None:
            (part,) = spec.rows
            slots.append(
                WeightSlot(
                    f"{part.name}.weight_g_idx", (spec.in_features,), layer.groups, (spec.columns,), optional=True
                )
            )
        return slots + _unread(layer, *unread, *([] if layer.groups is not None else ["weight_g_idx"]))


class _Bytes(ScaledLinear):
    """Codes of eight bits, plus 128, four in a word."""

    def __init__(self, scheme: Scheme) -> None:
        if scheme.ordered:
            raise ValueError("weights of 8 bits with ordered groups (actorder) are not supported")
        group = scheme.group_size if scheme.strategy == "group" else 0
        super().__init__(Stored(torch.int8, (1, group), zeros="" if scheme.symmetric else "weight_zero_point"))

    def create(self, layer: Any) -> list[WeightSlot]:
        slots = [slot for slot in super().create(layer) if not slot.name.endswith((".weight", ".weight_zero_point"))]
        spec: LinearSpec = layer.spec
        packed = WeightSlot.sharded("weight_packed", layer.codes, spec, 1, 4, dtype=torch.int32)
        slots += with_take(packed, partial(_bytes, layer.codes))
        if layer.zeros is not None:
            units = WeightSlot.sharded(
                "weight_zero_point", layer.zeros, spec, 4, self.stored.block[1], dtype=torch.int32
            )
            slots += with_take(units, lambda rows, piece: zeros_by_rows(layer, rows.start * 4, 8, -128, piece))
        return slots + _unread(
            layer, "weight_shape", "weight_g_idx", *([] if self.stored.zeros else ["weight_zero_point"])
        )


def _bytes(codes: Tensor, rows: slice, piece: Tensor) -> None:
    codes.data[rows] = (unpack(piece, 8, codes.shape[1]).to(torch.int16) - 128).to(torch.int8)


def _unread(layer: Any, *ends: str) -> list[WeightSlot]:
    """Tensors that may be there and say nothing more."""
    return [WeightSlot(f"{part.name}.{end}", (), None) for part in layer.spec.rows for end in ends]
