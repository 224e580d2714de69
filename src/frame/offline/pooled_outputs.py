"""What `LLM` returns for pooled texts: embeddings, probabilities of classes, scores. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from frame.core.front.outputs import PoolingOutput, PoolingRequestOutput

T = TypeVar("T")


@dataclass
class EmbeddingOutput:
    """One text as a vector."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises `ValueError` for rows of tokens."""
        return cls(_vector(output, "embedding").tolist())

    @property
    def hidden_size(self) -> int:
        """The size of the embedding."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """One number for each class: a probability, unless use_activation is off."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises `ValueError` for rows of tokens."""
        return cls(_vector(output, "classification").tolist())

    @property
    def num_classes(self) -> int:
        """Classes of the model."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts match."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises `ValueError` unless there is one number."""
        values = _vector(output, "score")
        if len(values) != 1:
            raise ValueError(f"a score is one number, the model gives {len(values)}")
        return cls(float(values[0]))


class _ReadRequestOutput(PoolingRequestOutput[T]):
    """A pooled request whose row is read as `_reads`, the class of `outputs`."""

    _reads: ClassVar[Any] = None

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> Self:
        """The same request with its row read; raises `ValueError` for rows of another shape."""
        return cls(base.request_id, cls._reads.from_base(base.outputs), base.prompt_token_ids, base.num_cached_tokens)


class EmbeddingRequestOutput(_ReadRequestOutput[EmbeddingOutput]):
    """An embedding with its request."""

    _reads = EmbeddingOutput


class ClassificationRequestOutput(_ReadRequestOutput[ClassificationOutput]):
    """Probabilities with their request."""

    _reads = ClassificationOutput


class ScoringRequestOutput(_ReadRequestOutput[ScoringOutput]):
    """A score with its request."""

    _reads = ScoringOutput


def _vector(output: PoolingOutput, what: str) -> np.ndarray:
    if output.data.ndim != 1:
        raise ValueError(f"one row is needed for a {what}, the pooler gives {len(output.data)}; ask with `encode`")
    return output.data
