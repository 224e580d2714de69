"""Families with normed queries and keys: OLMo 3, EXAONE 4, Apertus, Hunyuan (dense)."""

from __future__ import annotations

from typing import Any

from .decoder import sliding_window
from .dense import DenseDecoder, Rope, Traits

_NORMS = ("q_norm", "k_norm")
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


class Olmo3ForCausalLM(DenseDecoder):
    """OLMo 3: OLMo 2 with windows in three of four layers, and rope settings by type of layer."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=sliding_window(config, index),
            rope=Rope(layer_type=config.layer_types[index]),
            head_norms=_NORMS,
            over_heads=True,
            activation=config.hidden_act,
            before=("", ""),
            after=_BEHIND,
        )


class Exaone4ForCausalLM(DenseDecoder):
    """EXAONE 4: norms behind each part only; where there are windows, the other layers have no rotary positions."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        window = sliding_window(config, index)
        return Traits(
            window=window,
            rope=Rope() if window or config.sliding_window is None else None,
            head_norms=_NORMS,
            activation=config.hidden_act,
            before=("", ""),
            after=_BEHIND,
        )


class ApertusForCausalLM(DenseDecoder):
    """Apertus: a feed-forward part without a gate, whose activation is learned."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norms=_NORMS,
            activation=config.hidden_act,
            mlp="plain",
            before=("attention_layernorm", "feedforward_layernorm"),
        )


class HunYuanDenseV1ForCausalLM(DenseDecoder):
    """Hunyuan 0.5B to 7B: queries and keys are normed after they are turned."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            rope=Rope(after_norms=False),
            head_norms=("query_layernorm", "key_layernorm"),
            activation=config.hidden_act,
        )
