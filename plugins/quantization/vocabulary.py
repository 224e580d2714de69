"""An output head whose weights a method of linear layers holds."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.nn import functional

from frame.interfaces import EmbeddingMethod, EmbeddingSpec, LinearMethod, LinearSpec
from frame.layers import Rows, WeightSlot

from .joined import LinearPart


class LinearHead(EmbeddingMethod):
    """Projects by a linear layer of this rank's rows; padding gives zeros. It looks up no rows, so it is never tied."""

    def __init__(self, method: LinearMethod) -> None:
        self._method = method

    @property
    def stages(self) -> bool:  # type: ignore[override]
        """Whether the linear layer does."""
        return self._method.stages

    def create(self, layer: Any) -> list[WeightSlot]:
        spec: EmbeddingSpec = layer.spec
        rows = Rows(layer.prefix, spec.vocab_size, spec.start, spec.used)
        layer.projection = LinearPart(layer, LinearSpec((rows,), slice(0, spec.dim), spec.dim))
        return self._method.create(layer.projection)

    def begin_load(self, layer: Any) -> None:
        self._method.begin_load(layer.projection)

    def finish_load(self, layer: Any) -> None:
        self._method.finish_load(layer.projection)

    def rows(self, layer: Any, ids: Tensor) -> NoReturn:
        del ids
        raise ValueError(f"{layer.prefix}: a head with quantised weights looks up no rows")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        spec: EmbeddingSpec = layer.spec
        own = None if bias is None else bias[: spec.used]
        out = self._method.apply(layer.projection, x, own)
        return functional.pad(out, (0, spec.num_rows - spec.used)) if spec.used < spec.num_rows else out
