"""nanochat: norms without weights, also behind the embedding; heads are turned the other way round, and then normed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from frame.interfaces import ModelSetup
from frame.layers import RotaryEmbedding

from .dense import DenseDecoder, Rope, Traits
from .norms import NormSpec, UnweightedNorm


class NanoChatForCausalLM(DenseDecoder):
    """RMSNorm, rotary positions, normed heads, relu² without a gate, soft-capped logits."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        *DenseDecoder.renames,
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.embedded_norm = UnweightedNorm(setup.build, self.config.hidden_size, self.norms(self.config))
        tables = {part for part in self.modules() if isinstance(part, RotaryEmbedding)}
        for table in tables:
            table.cos_sin.chunk(2, dim=-1)[1].neg_()

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        return NormSpec(config.rms_norm_eps, weighted=False)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            rope=Rope(after_norms=False),
            head_norms=("", ""),
            activation=config.hidden_act,
            mlp="plain",
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.embedded_norm(super().embed(input_ids))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.final_logit_softcapping
        return cap * self.ops.map_rows(torch.tanh, logits / cap) if cap else logits
