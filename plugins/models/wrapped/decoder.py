"""The model of a class that generates."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelInputs

from .library import base_of
from .model import Wrapped
from .parts import GivenBase, HeadPart


class WrappedDecoder(Wrapped):
    """A causal class. Its head, and all that it does to logits, is the class's own around frame's product."""

    def make_parts(self, build: Build) -> None:
        whole, replacing = self.whole, self.replacing
        names = {module: name for name, module in whole.named_modules()}
        embedding = names.get(whole.get_input_embeddings(), "")
        output: Any = None if self.headless else whole.get_output_embeddings()
        head = names.get(output, "") if isinstance(output, nn.Linear) else ""
        tied = head and output.weight is whole.get_input_embeddings().weight
        self.replace(head)
        table = replacing.embedding(embedding) if embedding else None
        if self.headless:
            size = whole.get_input_embeddings_size() if hasattr(whole, "get_input_embeddings_size") else 0
            self.head = build.head("lm_head", size or whole.config.hidden_size, whole.config.vocab_size)
        elif head and (table is not None or not tied):
            new = build.head(
                head,
                output.in_features,
                output.out_features,
                tied=table if tied else None,
                bias=output.bias is not None,
            )
            replacing.put(head, HeadPart(new, build.dtype))
        sources: dict[str, str] = getattr(whole, "all_tied_weights_keys", None) or {}
        for name in (f"{head}.bias", f"{embedding}.weight"):
            if name in sources:
                self._names.also[sources[name]] = name

    def replace(self, head: str) -> None:
        """Replaces all parts but the output layer called `head`."""
        self.replacing.all(head)

    def prepare(self) -> None:
        super().prepare()
        self.wrap_base()

    def wrap_base(self) -> None:
        """Lets `logits` call the class with states that are there already."""
        if not self.headless:
            owner, name = base_of(self.whole)
            owner._modules[name] = self.given = GivenBase(self.base)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        return self.states(inputs, step)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, vocab_size]."""
        if self.headless:
            out: Tensor = self.head(hidden)
            return out
        return self.given.during(hidden[None], lambda states: self.whole(inputs_embeds=states, use_cache=False))[0]
