"""DistilBERT: BERT without segments, under other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import ModelOutput, ModelSetup

from .encoder import Encoder, LabelsTokens, Shape

#: That of all its norms; its configuration has none.
_EPS = 1e-12


class DistilBertModel(Encoder):
    """Learned positions, post-norm layers."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^distilbert\.", ""),
        (r"^transformer\.layer\.", "encoder.layer."),
        (r"\.attention\.q_lin\.", ".attention.self.query."),
        (r"\.attention\.k_lin\.", ".attention.self.key."),
        (r"\.attention\.v_lin\.", ".attention.self.value."),
        (r"\.attention\.out_lin\.", ".attention.output.dense."),
        (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
        (r"\.ffn\.lin1\.", ".intermediate.dense."),
        (r"\.ffn\.lin2\.", ".output.dense."),
        (r"\.output_layer_norm\.", ".output.LayerNorm."),
    )
    ignores: ClassVar[Sequence[str]] = (*Encoder.ignores, r"vocab_(transform|layer_norm|projector)\..*")

    def shape(self, config: Any) -> Shape:
        """What the family's configuration says."""
        return Shape(config.hidden_dim, config.activation, _EPS, 0, config.hidden_size)


class DistilBertForSequenceClassification(DistilBertModel):
    """Scores of classes: classifier(relu(pre_classifier(first token)))."""

    output: ClassVar[ModelOutput] = "classes"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        size = build.config.hidden_size
        self.dense = build.linear("pre_classifier", size, size, bias=True)
        self.classifier = build.linear("classifier", size, build.config.num_labels, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(torch.relu(self.dense(hidden)))
        return out


class DistilBertForTokenClassification(DistilBertModel, LabelsTokens):
    """Scores of classes for each token."""
