"""`PoolingBuild`: builds a generating model as one that embeds or classifies.

The model's decoder stays as it is; in place of the projection to the vocabulary it is given none, or one to classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .build import Build
from .linear import Linear, Rows
from .weights import WeightSlot

#: What transformers calls the projection of …ForSequenceClassification.
SCORE = "score"


class NoHead(nn.Module):
    """In place of a head that an embedding model does not call; the head's weights in the checkpoint are not read."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, hidden: Tensor) -> Tensor:
        """Raises `ValueError`: an embedding model gives hidden states only."""
        del hidden
        raise ValueError("the model was built to embed and has no output head")

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.{part}", (), None) for part in ("weight", "bias")]


class ScoreHead(Linear):
    """hidden [N, hidden_size] → scores [N, num_labels], read from "score.weight"."""

    def __init__(self, build: Build, prefix: str, hidden_size: int, num_labels: int) -> None:
        super().__init__(build, [Rows(SCORE, num_labels, 0, num_labels)], hidden_size, slice(0, hidden_size))
        self.prefix = prefix

    def weight_slots(self) -> list[WeightSlot]:
        return [*super().weight_slots(), WeightSlot(f"{self.prefix}.weight", (), None)]


@dataclass(kw_only=True)
class PoolingBuild(Build):
    """`num_labels` 0: without a head."""

    num_labels: int = 0

    def head(
        self, prefix: str, hidden_size: int, vocab_size: int, *, tied: nn.Module | None = None, bias: bool = False
    ) -> nn.Module:
        del vocab_size, tied, bias
        if not self.num_labels:
            return NoHead(prefix)
        return ScoreHead(self, prefix, hidden_size, self.num_labels)
