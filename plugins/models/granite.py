"""Granite, HyperCLOVA X and MiniCPM: embeddings, branches, scores and logits have factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from .decoder import sliding_window
from .dense import DenseDecoder, Rope, Traits


class GraniteDecoder(DenseDecoder):
    """What the two share: scaled embeddings, scores and branches."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.attention_multiplier,
            activation=config.hidden_act,
            mlp_bias=config.mlp_bias,
            branch_scale=config.residual_multiplier,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.embedding_multiplier)


class GraniteForCausalLM(GraniteDecoder):
    """Granite 3."""

    divides_logits: ClassVar[bool] = True

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / float(self.config.logits_scaling)


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """Granite with windows, learned logits of attention that takes nothing in, and a base of rope for each layer."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        base = config.layer_rope_theta[index]
        return replace(
            super().traits(config, index),
            window=sliding_window(config, index),
            sinks=True,
            rope=Rope(base=float(base)) if base else None,
        )


class HyperCLOVAXForCausalLM(GraniteDecoder):
    """HyperCLOVA X SEED: Granite with optional norms behind each part, and logits that are multiplied."""

    divides_logits: ClassVar[bool] = True

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        after = ("post_norm1", "post_norm2") if config.use_post_norm else ("", "")
        return replace(super().traits(config, index), after=after)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * float(self.config.logits_scaling)


class MiniCPMForCausalLM(DenseDecoder):
    """MiniCPM: branches by the number of layers, logits by the width of a model that its settings were found with."""

    divides_logits: ClassVar[bool] = True

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        for name in ("num_experts", "sparse_config"):
            if value := getattr(config, name, None):
                raise ValueError(f"MiniCPM with {name}={value!r} is not supported, only without it")
        bias = getattr(config, "attention_bias", False)
        scale = config.scale_depth / config.num_hidden_layers**0.5
        return Traits(bias=bias, output_bias=bias, activation=config.hidden_act, branch_scale=scale)

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.scale_emb)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden / (self.config.hidden_size / self.config.dim_model_base))
