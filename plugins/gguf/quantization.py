"""gguf: weights that stay in the codes of their file's blocks, and are given their values for each product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
)
from frame.layers import Rows, WeightSlot

from ..quantization.joined import by_parts
from .blocks import PACKED
from .experts import PackedExperts
from .held import Held, held_as
from .types import BY_LIBRARY, BY_NAME


def block_slots(held: Held, layer: Any, parameter: Tensor, spec: LinearSpec) -> list[WeightSlot]:
    """The slots of tensors "PART.KIND" of whole blocks [rows, blocks, bytes], which `held` takes into `layer`.

    Raises `ValueError` where this rank's share cuts a block.
    """
    block = BY_NAME[held.kind]
    slots = WeightSlot.sharded(held.kind.lower(), parameter, spec, 1, block.values, dtype=torch.uint8, near=held.near)
    return [
        replace(slot, shape=(*slot.shape, block.num_bytes), take=partial(held.put, layer, slot.region[0]))
        for slot in slots
    ]


def require_whole_blocks(kind: str, spec: LinearSpec) -> None:
    """Raises `ValueError` where this rank's share cuts a block."""
    values = BY_NAME[kind].values
    if spec.width % values or spec.columns.start % values:
        raise ValueError(
            f"{spec.prefix}: this rank holds columns {spec.columns.start} to {spec.columns.stop} of "
            f"{spec.in_features}, which cut blocks of {values} ({kind}); divide the model over fewer devices"
        )


class BlockLinear(LinearMethod):
    """A weight of one type of blocks, whose parameters are those of `held_as`."""

    def __init__(self, kind: str) -> None:
        self._held = held_as(kind)

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: LinearSpec = layer.spec
        require_whole_blocks(self._held.kind, spec)
        first, *_ = self._held.create(layer, spec.out_features, spec.width)
        return block_slots(self._held, layer, first, spec)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._held.apply(layer, x, bias)


class BlockEmbedding(EmbeddingMethod):
    """As `BlockLinear`, looked up, multiplied, or both."""

    def __init__(self, kind: str) -> None:
        self._held = held_as(kind)

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: EmbeddingSpec = layer.spec
        made = self._held.create(layer, spec.num_rows, spec.dim)
        for parameter in made:
            parameter.data[spec.used :].zero_()
        rows = Rows(layer.prefix, spec.vocab_size, spec.start, spec.used)
        return block_slots(self._held, layer, made[0], LinearSpec((rows,), slice(0, spec.dim), spec.dim))

    def rows(self, layer: Any, ids: Tensor) -> Tensor:
        return self._held.values(layer, ids, layer.dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._held.apply(layer, x, bias)


class Gguf(Quantization):
    """Each tensor has the type that its file says, which the names of the loader's tensors end with.

    Where weights are made up, linear layers and experts have the type `default` of the quantization_config, or are as
    in a model that is not quantised if that type is none that stays in its blocks.
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
        if self.setup.tensors or wanted[0] in BY_LIBRARY:
            return None
        fitting = (kind for kind in wanted if kind in PACKED and not any(w % BY_NAME[kind].values for w in widths))
        return next(fitting, None)

    def _kind(self, name: str, default: str | None) -> str | None:
        """The type of the tensor "NAME.KIND"; None where it is not in blocks of codes."""
        return next((kind for kind in PACKED if f"{name}.{kind.lower()}" in self.setup.tensors), default)
