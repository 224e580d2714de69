"""ModelOpt: fp8 by tensor, row or block, mxfp8, and nvfp4; from config.json or hf_quant_config.json.

4-bit floats are dequantised: activations keep the model's type.
"""

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

from .codebook import FloatLinear, nvfp4
from .codebook_experts import FloatExperts
from .experts import StoredExperts
from .joined import by_parts
from .names import Names
from .scaled import ScaledLinear, Stored, exponent_type
from .settings import name_list, require
from .vocabulary import LinearHead

E4M3 = torch.float8_e4m3fn
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4")
#: The types of weights that such layers have.
_TYPES = {"NVFP4": torch.uint8}
_NVFP4 = nvfp4("weight", "weight_scale", "weight_scale_2", unread=("input_scale",))


@dataclass(frozen=True)
class Scheme:
    """How a layer is stored; `has_input`: with a scale of its inputs; `wide`: scales of blocks are [n, 1, k, 1].

    `exponents` is the type of scales that are powers of two.
    """

    algorithm: str
    has_input: bool = False
    wide: bool = False
    exponents: torch.dtype | None = None


class ModelOpt(Quantization):
    """`exclude_modules` or `ignore` are globs of names; a mixed file names the algorithm of each layer."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        whole = setup.quantization_config or {}
        inner = whole.get("quantization")
        config: Mapping[str, Any] = inner if isinstance(inner, Mapping) else whole
        self._algorithm = config.get("quant_algo")
        self._of_layers: list[tuple[Names, str]] = []
        if self._algorithm == "MIXED_PRECISION":
            layers = config.get("quantized_layers") or {}
            for name, said in layers.items() if isinstance(layers, Mapping) else ():
                algorithm = said.get("quant_algo") if isinstance(said, Mapping) else said
                require(f"quant_algo of {name}", algorithm, _ALGORITHMS)
                self._of_layers.append((Names([name], setup.renames), str(algorithm)))
        else:
            require("quant_algo", self._algorithm, (*_ALGORITHMS, "MIXED_PRECISION"))
        if config.get("group_size") not in (None, 0, -1):
            require("group_size", config.get("group_size"), (16,) if self._algorithm == "NVFP4" else (16, 32, 128))
        ignored = [one for key in ("exclude_modules", "ignore") for one in name_list(key, config.get(key))]
        self._ignored = Names(ignored, setup.renames)
        self._cache_algorithm = config.get("kv_cache_quant_algo")
        if isinstance(scheme := config.get("kv_cache_scheme"), Mapping):
            self._cache_algorithm = f"{scheme.get('type')}{scheme.get('num_bits')}".replace("float8", "FP8")

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        method, producer = quantization_config.get("quant_method"), quantization_config.get("producer")
        if method is not None:
            return method in ("modelopt", "modelopt_fp4")
        return isinstance(producer, Mapping) and producer.get("name") == "modelopt"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        cuts = any(part.count % 128 for part in spec.rows[:-1])  # so that a block lies in two tensors
        return by_parts(spec, self._scheme_of, _method, lambda scheme: scheme.algorithm == "FP8_PB_WO" and cuts)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        scheme = self._scheme_of(prefix) if spec.head and self.setup.tensors else None
        return None if scheme is None else LinearHead(_method(scheme))

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        scheme = self._scheme_of(f"{prefix}.0.{spec.names[0]}")
        if scheme is None:
            return None
        if scheme.algorithm == "NVFP4":
            return FloatExperts(_NVFP4)
        if scheme.wide:
            raise ValueError(f"{prefix}: experts of {scheme.algorithm} in this form are not supported")
        stored = _stored(scheme)
        block = stored.block
        names = ("weight", "weight_scale")
        if scheme.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            raise ValueError(f"{prefix}: experts of {scheme.algorithm} are not supported")
        return StoredExperts(
            E4M3,
            block,
            names,
            per_tensor=not block[0],
            ignored=("input_scale",),
            exponents=stored.exponents,
            rounds=scheme.algorithm == "FP8",
        )

    def cache(self, prefix: str, spec: AttentionSpec) -> CacheQuantization | None:
        if self._cache_algorithm in (None, "None", "none"):
            return None
        if self._cache_algorithm != "FP8":
            raise ValueError(
                f"kv_cache_quant_algo of the quantization_config is {self._cache_algorithm!r:.80}; frame reads: FP8; "
                "or give --kv-cache-dtype"
            )
        return CacheQuantization(E4M3)

    @property
    def numerics(self) -> str:
        return f"modelopt {self._algorithm} weights"

    def _scheme_of(self, name: str) -> Scheme | None:
        """How the layer `name` is stored; None where it is not quantised. Raises `ValueError` where tensors differ."""
        if name in self._ignored:
            return None
        found = self._algorithm
        if self._algorithm == "MIXED_PRECISION":
            found = next((algorithm for names, algorithm in self._of_layers if name in names), None)
        tensors = self.setup.tensors
        weight = tensors.get(f"{name}.weight")
        if found is None or (tensors and f"{name}.weight_scale" not in tensors):
            return None
        expected = _TYPES.get(found, E4M3)
        if weight is not None and weight.dtype != expected:
            raise ValueError(f"the quantization_config says {found} of {name}, whose weight is {weight.dtype}")
        scale = tensors.get(f"{name}.weight_scale")
        has_input = f"{name}.input_scale" in tensors if tensors else found == "FP8"
        exponents = exponent_type(tensors, f"{name}.weight_scale") or (torch.uint8 if found == "MXFP8" else None)
        return Scheme(found, has_input, scale is not None and len(scale.shape) == 4, exponents)


def _stored(scheme: Scheme) -> Stored:
    blocks = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128), "MXFP8": (1, 32)}
    rows = scheme.algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    static = "input_scale" if scheme.has_input else ""
    return Stored(E4M3, blocks[scheme.algorithm], input_scale=static, flat=rows, exponents=scheme.exponents)


def _method(scheme: Scheme) -> LinearMethod:
    return FloatLinear(_NVFP4) if scheme.algorithm == "NVFP4" else OptLinear(scheme)


class OptLinear(ScaledLinear):
    """8-bit floats; scales of blocks may have axes of one."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(_stored(scheme))
        self._scheme = scheme

    def create(self, layer: Any) -> list[WeightSlot]:
        slots = super().create(layer)
        for place, slot in enumerate(slots):
            if slot.name.endswith(".weight_scale") and self._scheme.wide:
                (rows, columns), index = slot.shape, slot.index
                shape, wide = (rows, 1, columns, 1), (index[0], slice(0, 1), index[1])
                slots[place] = replace(slot, shape=shape, index=wide, take=partial(_blocks, layer, slot.region))
        return slots


def _blocks(layer: Any, region: tuple[slice, ...], piece: Tensor) -> None:
    layer.scales.data[region] = piece[:, 0, :, 0].float()
