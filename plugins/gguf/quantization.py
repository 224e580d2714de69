"""gguf: weights that stay in the blocks of their file, and are given their values for each product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from frame.interfaces import (
    EmbeddingMethod,
    EmbeddingSpec,
    ExpertMethod,
    ExpertSpec,
    LinearMethod,
    LinearSpec,
    Quantization,
)
from frame.layers import Rows, WeightSlot

from ..quantization.joined import by_parts
from .blocks import PACKED, dequantize
from .experts import PackedExperts
from .types import BY_NAME

#: Values that are made at once of a weight's blocks.
_AT_ONCE = 1 << 25
#: What bytes of made-up blocks are near: as the two bytes of a float16 scale they are about a thousandth.
DUMMY_BYTES = (20.0, 4.0)


def block_slots(parameter: Tensor, kind: str, spec: LinearSpec) -> list[WeightSlot]:
    """The slots of uint8 `parameter` [rows, blocks, bytes] for tensors "PART.KIND" of whole blocks.

    Raises `ValueError` where this rank's share cuts a block.
    """
    block = BY_NAME[kind]
    slots = WeightSlot.sharded(kind.lower(), parameter, spec, 1, block.values, dtype=torch.uint8, near=DUMMY_BYTES)
    return [replace(slot, shape=(*slot.shape, block.num_bytes)) for slot in slots]


def require_whole_blocks(kind: str, spec: LinearSpec) -> int:
    """The blocks of a row of this rank's share; raises `ValueError` where it cuts one."""
    values = BY_NAME[kind].values
    if spec.width % values or spec.columns.start % values:
        raise ValueError(
            f"{spec.prefix}: this rank holds columns {spec.columns.start} to {spec.columns.stop} of "
            f"{spec.in_features}, which cut blocks of {values} ({kind}); divide the model over fewer devices"
        )
    return spec.width // values


class BlockLinear(LinearMethod):
    """`layer.blocks` uint8 [out_features, blocks of a row, bytes of a block], of one type."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: LinearSpec = layer.spec
        blocks = require_whole_blocks(self._kind, spec)
        layer.blocks = layer.empty(spec.out_features, blocks, BY_NAME[self._kind].num_bytes, dtype=torch.uint8)
        return block_slots(layer.blocks, self._kind, spec)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return product(layer, layer.blocks, self._kind, x, bias)


def product(layer: Any, blocks: Tensor, kind: str, x: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b of W in blocks, some rows after the other, so that little of it is there in full."""
    step = max(1, _AT_ONCE // (blocks.shape[1] * BY_NAME[kind].values))
    if len(blocks) <= step:
        whole: Tensor = layer.ops.linear(x, dequantize(blocks, kind, x.dtype), bias)
        return whole
    biases = [None] * -(-len(blocks) // step) if bias is None else bias.split(step)
    parts = zip(blocks.split(step), biases, strict=True)
    return torch.cat([layer.ops.linear(x, dequantize(rows, kind, x.dtype), own) for rows, own in parts], -1)


class BlockEmbedding(EmbeddingMethod):
    """`layer.blocks` uint8 [num_rows, blocks of a row, bytes of a block], looked up, multiplied, or both."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: EmbeddingSpec = layer.spec
        block = BY_NAME[self._kind]
        layer.blocks = layer.empty(spec.num_rows, spec.dim // block.values, block.num_bytes, dtype=torch.uint8)
        layer.blocks.data[spec.used :].zero_()
        rows = Rows(layer.prefix, spec.vocab_size, spec.start, spec.used)
        return block_slots(layer.blocks, self._kind, LinearSpec((rows,), slice(0, spec.dim), spec.dim))

    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        return dequantize(functional.embedding(ids, layer.blocks.flatten(1)).unflatten(1, layer.blocks.shape[1:]),
                          self._kind, layer.dtype)  # fmt: skip

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return product(layer, layer.blocks, self._kind, x, bias)


class Gguf(Quantization):
    """Each tensor has the type that its file says, which the names of the loader's tensors end with.

    Where weights are made up, linear layers and experts have the type `default` of the quantization_config.
    """

    @classmethod
    def reads(cls, quantization_config: Mapping[str, Any]) -> bool:
        return quantization_config.get("quant_method") == "gguf"

    def linear(self, prefix: str, spec: LinearSpec) -> LinearMethod | None:
        del prefix
        if spec.transposed:
            return None
        default = self._default(spec.width, spec.in_features) if not spec.exact else None
        return by_parts(spec, lambda name: self._kind(name, default), BlockLinear)

    def embedding(self, prefix: str, spec: EmbeddingSpec) -> EmbeddingMethod | None:
        kind = self._kind(prefix, self._default(spec.dim))
        return None if kind is None else BlockEmbedding(kind)

    def experts(self, prefix: str, spec: ExpertSpec) -> ExpertMethod | None:
        default = self._default(spec.hidden_size, spec.intermediate_size)
        kinds = [self._kind(f"{prefix}.0.{part}", default) for part in spec.names]
        return None if not any(kinds) else PackedExperts(kinds)

    @property
    def numerics(self) -> str:
        return "gguf blocks"

    def _default(self, *widths: int) -> str | None:
        """The type of made-up tensors whose rows have these lengths; None where there are tensors or no type fits."""
        wanted: Sequence[str] = (str((self.setup.quantization_config or {}).get("default", "")), "Q8_0")
        fitting = (kind for kind in wanted if kind in PACKED and not any(w % BY_NAME[kind].values for w in widths))
        return None if self.setup.tensors else next(fitting, None)

    def _kind(self, name: str, default: str | None) -> str | None:
        """The type of the tensor "NAME.KIND"; None where it is not in blocks of codes."""
        return next((kind for kind in PACKED if f"{name}.{kind.lower()}" in self.setup.tensors), default)
