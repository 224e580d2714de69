"""Nemotron 3 and 4, and Jais 2: LayerNorms with biases, a feed-forward part without a gate, relu²."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .dense import DenseDecoder, Rope, Traits
from .norms import NormSpec


class Jais2ForCausalLM(DenseDecoder):
    """Jais 2."""

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        return NormSpec(config.layer_norm_eps, kind="layer")

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            activation=config.hidden_act,
            mlp="plain",
            mlp_bias=config.mlp_bias,
        )


class NemotronForCausalLM(Jais2ForCausalLM):
    """Nemotron and Minitron: the norms' weights are stored less 1, and half of each head is turned."""

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        return NormSpec(config.norm_eps, kind="layer", offset=1.0)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return replace(super().traits(config, index), rope=Rope(partial=0.5))
