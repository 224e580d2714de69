"""The models of classes whose tokens see their whole prompt: they embed, or score classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import Build, ForwardStep, ModelInputs, ModelOutput

from .library import base_of
from .model import Wrapped
from .parts import GivenBase

_CLASSIFIES = "ForSequenceClassification"


class WrappedEncoder(Wrapped):
    """A class without a head; gives hidden states."""

    sees_all: ClassVar[bool] = True
    output: ClassVar[ModelOutput] = "hidden"
    default_pooler: ClassVar[str] = "cls"
    whole_prompts: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    @classmethod
    def supports(cls, architecture: str, config: Mapping[str, Any]) -> str | None:
        if architecture.endswith(_CLASSIFIES) != (cls.output == "classes"):
            return f"{architecture} {'classifies' if cls.output == 'hidden' else 'does not classify'}"
        return super().supports(architecture, config)

    def make_parts(self, build: Build) -> None:
        names = {module: name for name, module in self.whole.named_modules()}
        self.replacing.all()
        self.replacing.embedding(names[self.whole.get_input_embeddings()])

    def prepare(self) -> None:
        super().prepare()
        self._takes_segments = "token_type_ids" in inspect.signature(self.base.forward).parameters

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        if not self._takes_segments:
            return self.states(inputs, step)
        segments = inputs.segments
        if segments is None:
            segments = torch.zeros_like(inputs.positions[0])
        return self.states(inputs, step, token_type_ids=segments[None])

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises `ValueError`: this model has no head."""
        raise ValueError(f"{self.kind.__name__} has no output head, it gives hidden states of size {hidden.shape[-1]}")


class WrappedClassifier(WrappedEncoder):
    """A class that scores classes by the first token of a text; what it does to that is the class's own."""

    output: ClassVar[ModelOutput] = "classes"

    def prepare(self) -> None:
        super().prepare()
        owner, name = base_of(self.whole)
        owner._modules[name] = self.given = GivenBase(self.base)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes], each row as a text of one token."""
        return self.given.during(hidden[:, None], lambda states: self.whole(inputs_embeds=states))
