"""torchao's safetensors: integers and 8-bit floats by rows, groups or tensors, one number a byte.

Which of its classes a tensor has follows from its parts. 4-bit tensors that are packed for a kernel are refused, and
pickles are refused by the loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

from .joined import by_parts
from .names import Names
from .scaled import ScaledLinear, Stored
from .settings import name_list, require
from .vocabulary import LinearHead

#: The configurations whose tensors are one number a byte, and the type of these.
_CONFIGS = {
    "Int8WeightOnlyConfig": torch.int8,
    "Int8DynamicActivationInt8WeightConfig": torch.int8,
    "IntxWeightOnlyConfig": torch.int8,
    "Int8DynamicActivationIntxWeightConfig": torch.int8,
    "Float8WeightOnlyConfig": torch.float8_e4m3fn,
    "Float8DynamicActivationFloat8WeightConfig": torch.float8_e4m3fn,
}
#: Configurations that hold those of layers by name.
_HOLDERS = ("FqnToConfig", "ModuleFqnToConfig")
_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
#: The ends of tensors that are packed for a kernel, or scale activations.
_OTHERS = ("_weight_scale_and_zero", "_weight_act_pre_scale", "_weight_per_tensor_scale")


@dataclass(frozen=True)
class Scheme:
    """How a layer is stored: a scale, and a zero point if `zeros`, for `block` rows and columns; (0, 0): for all."""

    dtype: torch.dtype
    block: tuple[int, int]
    zeros: bool


class Torchao(Quantization):
    """Layers are quantised that have such tensors; of made-up weights all but `modules_to_not_convert`."""

    def __init__(self, setup: QuantizationSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        config = setup.quantization_config or {}
        self._configs = list(_configs(config.get("quant_type")))
        if not self._configs:
            require("quant_type", config.get("quant_type"), tuple(_CONFIGS))
        for name in self._configs:
            require("quant_type", name, tuple(_CONFIGS))
        self._ignored = Names(name_list("modules_to_not_convert", config.get("modules_to_not_convert")), setup.renames)
        for name in setup.tensors:
            if name.endswith(_OTHERS):
                raise ValueError(
                    f"{name}: torchao's tensors that are packed for a kernel, or scale inputs, are not read"
                )
        if setup.tensors and not any(name.endswith(f".{_CODES}") for name in setup.tensors):
            raise ValueError(
                f"the quantization_config says torchao, but no tensor of the checkpoint ends in {_CODES!r}"
            )

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "torchao"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        if spec.exact and not self.setup.tensors:
            return None
        return by_parts(spec, self._scheme_of, TorchaoLinear)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        scheme = self._scheme_of(prefix) if self.setup.tensors else None
        if scheme is not None and not spec.head:
            raise ValueError(f"{prefix}: an embedding that torchao quantised is not supported")
        return None if scheme is None else LinearHead(TorchaoLinear(scheme))

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        inside = (name for name in self.setup.tensors if name.startswith(f"{prefix}.") and name.endswith("_qdata"))
        if (found := next(inside, None)) is not None:
            raise ValueError(f"{found}: routed experts that torchao quantised are not supported")
        return None

    @property
    def numerics(self) -> str:
        return f"torchao {', '.join(dict.fromkeys(self._configs))} as weights alone"

    def _scheme_of(self, name: str) -> Scheme | None:
        """How the layer `name` is stored; None where it is not quantised."""
        tensors = self.setup.tensors
        if not tensors:
            dtype = _CONFIGS[self._configs[0]]
            return None if name in self._ignored else Scheme(dtype, (1, 0), not dtype.is_floating_point)
        codes, scale = tensors.get(f"{name}.{_CODES}"), tensors.get(f"{name}.{_SCALE}")
        if codes is None:
            return None
        if codes.dtype not in _CONFIGS.values() or len(codes.shape) != 2:
            raise ValueError(
                f"{name}.{_CODES} is {codes.dtype} {list(codes.shape)}: frame reads torchao's int8 and float8_e4m3fn, "
                "one number a byte, and no tensors that are packed for a kernel"
            )
        if scale is None:
            raise ValueError(f"the checkpoint has {name}.{_CODES}, but no {name}.{_SCALE}")
        sizes = scale.shape if len(scale.shape) == 2 else (1, 1)
        if any(size % max(1, count) or not count for size, count in zip(codes.shape, sizes, strict=True)):
            raise ValueError(f"{name}.{_SCALE} {list(scale.shape)} does not divide its codes {list(codes.shape)}")
        rows, columns = (size // count for size, count in zip(codes.shape, sizes, strict=True))
        whole = sizes == (1, 1)
        block = (0, 0) if whole else (rows, 0 if sizes[1] == 1 else columns)
        return Scheme(codes.dtype, block, f"{name}.{_ZERO}" in tensors)


class TorchaoLinear(ScaledLinear):
    """w = (code - zero point) · scale."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__(Stored(scheme.dtype, scheme.block, scale=_SCALE, zeros=_ZERO if scheme.zeros else ""))

    def create(self, layer: Any) -> list[WeightSlot]:
        slots = []
        for slot in super().create(layer):
            if slot.name.endswith(".weight"):
                slot = replace(slot, name=f"{slot.name.removesuffix('weight')}{_CODES}")
            elif self.stored.block == (0, 0) and slot.shape == ():
                slot = replace(slot, shape=(1, 1), take=partial(_fill, layer.scales, slot.region))
            slots.append(slot)
        return slots


def _fill(scales: Tensor, region: tuple[slice, ...], piece: Tensor) -> None:
    scales.data[region] = piece.float()


def _configs(value: Any) -> Iterator[str]:
    """The names of all configurations in a quant_type."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        kind = value.get("_type")
        if kind is not None and kind not in _HOLDERS:
            yield str(kind)
            return
        inner = value if kind is None else value.get("_data")
        for one in inner.values() if isinstance(inner, Mapping) else ():
            yield from _configs(one)
