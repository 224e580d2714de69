"""RoBERTa and XLM-RoBERTa: BERT with one segment, and positions that start after the padding token's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import ModelOutput, ModelSetup

from .encoder import Encoder, LabelsTokens


class RobertaModel(Encoder):
    """Learned positions from pad_token_id + 1 on, post-norm layers."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^roberta\.", ""),)
    ignores: ClassVar[Sequence[str]] = (*Encoder.ignores, r"roberta\.pooler\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options, first_position=build.config.pad_token_id + 1)


class RobertaForSequenceClassification(RobertaModel):
    """Scores of classes: out_proj(tanh(dense(first token)))."""

    output: ClassVar[ModelOutput] = "classes"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        size = build.config.hidden_size
        self.dense = build.linear("classifier.dense", size, size, bias=True)
        self.classifier = build.linear("classifier.out_proj", size, build.config.num_labels, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(torch.tanh(self.dense(hidden)))
        return out


class RobertaForTokenClassification(RobertaModel, LabelsTokens):
    """Scores of classes for each token."""
