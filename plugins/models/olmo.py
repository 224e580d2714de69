"""OLMo 1: LayerNorms without weights; what the projections of the attention give may be clipped."""

from __future__ import annotations

from typing import Any

from .dense import DenseDecoder, Traits
from .norms import NormSpec


class OlmoForCausalLM(DenseDecoder):
    """OLMo 1B and 7B."""

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        del config
        return NormSpec(1e-5, kind="layer", weighted=False)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            clip=config.clip_qkv or 0.0,
            activation=config.hidden_act,
        )
