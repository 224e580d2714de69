"""Gemma 1, and VaultGemma, which is Gemma 2 without the norms behind each part."""

from __future__ import annotations

from typing import Any

from .decoder import sliding_window
from .dense import DenseDecoder, Traits
from .gemma2 import GemmaDecoder
from .norms import NormSpec


class GemmaForCausalLM(GemmaDecoder, DenseDecoder):
    """RMSNorm of weight + 1, rotary positions, grouped-query attention, GeGLU, scaled embeddings."""

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        return NormSpec(config.rms_norm_eps, offset=1.0)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        if getattr(config, "use_bidirectional_attention", None):
            raise ValueError("Gemma with use_bidirectional_attention=true is not supported, only false")
        # the first releases say "gelu" and mean its approximation
        activation = "gelu_pytorch_tanh" if config.hidden_act == "gelu" else config.hidden_act
        return Traits(bias=config.attention_bias, output_bias=config.attention_bias, activation=activation)


class VaultGemmaForCausalLM(GemmaDecoder, DenseDecoder):
    """Gemma 1 with windows in turn and soft-capped scores and logits."""

    @classmethod
    def norms(cls, config: Any) -> NormSpec:
        return NormSpec(config.rms_norm_eps, offset=1.0)

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.query_pre_attn_scalar**-0.5,
            window=sliding_window(config, index),
            soft_cap=config.attn_logit_softcapping or 0.0,
            activation=config.hidden_activation,
            before=("input_layernorm", "pre_feedforward_layernorm"),
        )
