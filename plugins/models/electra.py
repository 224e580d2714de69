"""ELECTRA: BERT whose embeddings may be narrower than its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from frame.interfaces import ModelOutput, ModelSetup

from .encoder import Encoder, LabelsTokens, Shape


class ElectraModel(Encoder):
    """Learned positions, two segments, post-norm layers."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^electra\.", ""),)
    ignores: ClassVar[Sequence[str]] = (
        r".*embeddings\.position_ids",
        r"(discriminator_predictions|generator_predictions|generator_lm_head)\..*",
    )
    segments: ClassVar[bool] = True

    def shape(self, config: Any) -> Shape:
        """What the family's configuration says."""
        return replace(super().shape(config), width=config.embedding_size)


class ElectraForSequenceClassification(ElectraModel):
    """Scores of classes: out_proj(gelu(dense(first token)))."""

    output: ClassVar[ModelOutput] = "classes"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        size = build.config.hidden_size
        self.dense = build.linear("classifier.dense", size, size, bias=True)
        self.classifier = build.linear("classifier.out_proj", size, build.config.num_labels, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(functional.gelu(self.dense(hidden)))
        return out


class ElectraForTokenClassification(ElectraModel, LabelsTokens):
    """Scores of classes for each token."""
