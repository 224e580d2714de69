"""Families that differ from Llama in biases, rope, windows or activation alone."""

from __future__ import annotations

from typing import Any

from .decoder import sliding_window
from .dense import DenseDecoder, Rope, Traits


class SmolLM3ForCausalLM(DenseDecoder):
    """SmolLM3: some layers have no rotary positions, those whose entry of `no_rope_layers` is 0."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            window=sliding_window(config, index),
            rope=Rope() if config.no_rope_layers[index] else None,
            activation=config.hidden_act,
            mlp_bias=config.mlp_bias,
        )


class SeedOssForCausalLM(DenseDecoder):
    """Seed-OSS: biases of inputs and output of the attention, each switched by itself."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_out_bias,
            activation=config.hidden_act,
            mlp_bias=config.mlp_bias,
        )


class Ernie4_5ForCausalLM(DenseDecoder):
    """ERNIE 4.5, dense: neighbouring features are turned together; one switch for all biases."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        bias = bool(config.use_bias)
        rope = Rope(interleaved=True)
        return Traits(bias=bias, output_bias=bias, rope=rope, activation=config.hidden_act, mlp_bias=bias)


class HeliumForCausalLM(DenseDecoder):
    """Helium: neighbouring features are turned together; no bias behind the attention."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            rope=Rope(interleaved=True),
            activation=config.hidden_act,
            mlp_bias=config.mlp_bias,
        )


class ArceeForCausalLM(DenseDecoder):
    """AFM: no gate; the feed-forward part is down(relu(up(x))²)."""

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


class MinistralForCausalLM(DenseDecoder):
    """Ministral: Mistral with windows in the layers that the checkpoint names."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        return Traits(window=sliding_window(config, index), activation=config.hidden_act)


class Ministral3ForCausalLM(DenseDecoder):
    """Ministral 3: Mistral whose queries grow with their positions."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        rope = config.rope_parameters
        beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        if beta and not length:
            raise ValueError("llama_4_scaling_beta needs original_max_position_embeddings in rope_parameters")
        growth = (float(beta), int(length)) if beta else None
        return Traits(window=config.sliding_window or 0, rope=Rope(growth=growth), activation=config.hidden_act)


class CwmForCausalLM(DenseDecoder):
    """CWM: Llama 3 with windows in the layers that the checkpoint names."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        window = sliding_window(config, index)
        return Traits(window=window, activation=config.hidden_act, mlp_bias=config.mlp_bias)
