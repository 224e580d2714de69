"""BERT, and the many embedding models and cross-encoders that use its architecture (MiniLM, BGE, E5, GTE, …)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import ModelOutput, ModelSetup

from .encoder import Encoder, LabelsTokens

_OLD_NAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))


class BertModel(Encoder):
    """Learned positions, two segments, post-norm layers."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^bert\.", ""), *_OLD_NAMES)
    ignores: ClassVar[Sequence[str]] = (*Encoder.ignores, r"bert\.(pooler|embeddings\.position_ids).*")
    segments: ClassVar[bool] = True


class BertForSequenceClassification(BertModel):
    """Scores of classes: classifier(tanh(dense(first token)))."""

    ignores: ClassVar[Sequence[str]] = (r".*embeddings\.position_ids",)
    output: ClassVar[ModelOutput] = "classes"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        size = build.config.hidden_size
        self.dense = build.linear("pooler.dense", size, size, bias=True)
        self.classifier = build.linear("classifier", size, build.config.num_labels, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(torch.tanh(self.dense(hidden)))
        return out


class BertForTokenClassification(BertModel, LabelsTokens):
    """Scores of classes for each token."""
