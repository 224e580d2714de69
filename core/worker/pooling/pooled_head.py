"""What follows pooling: an embedding is cut and normalised, a score is biased and made a probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...config.pooling import Activation
from ...interfaces.model import Model
from ...interfaces.pooling_params import PoolingParams
from ...ops import Ops


@dataclass(frozen=True)
class PooledHead:
    """`kind` says whether pooled rows are embeddings or go through the model's head. None in a request: as set here."""

    model: Model
    ops: Ops
    kind: Literal["embedding", "scores"]
    normalize: bool
    dimensions: int | None
    use_activation: bool
    activation: Activation
    bias: float | None = None
    returned: tuple[int, ...] = ()

    def key(self, params: PoolingParams) -> tuple[bool | int | None, ...]:
        """Equal for requests whose rows `finish` may take together."""
        return params.normalize, params.dimensions, params.use_activation

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        """float32 [N, size] for pooled rows [N, hidden_size]."""
        return self._embedding(rows, params) if self.kind == "embedding" else self._scores(rows, params)

    def _embedding(self, rows: Tensor, params: PoolingParams) -> Tensor:
        size = self.dimensions if params.dimensions is None else params.dimensions
        if size is not None:
            rows = rows[:, :size]
        normalize = self.normalize if params.normalize is None else params.normalize
        return self.ops.unit(rows.float()) if normalize else rows.float().clone()

    def _scores(self, rows: Tensor, params: PoolingParams) -> Tensor:
        logits = self.model.logits(rows.to(next(self.model.parameters()).dtype)).float()
        if self.returned:
            logits = logits[:, list(self.returned)]
        if self.bias is not None:
            logits = logits - self.bias
        wanted = self.use_activation if params.use_activation is None else params.use_activation
        if not wanted or self.activation == "identity":
            return logits
        return torch.sigmoid(logits) if self.activation == "sigmoid" else logits.softmax(-1)
