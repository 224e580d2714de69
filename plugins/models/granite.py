"""Granite and HyperCLOVA X: embeddings, branches, scores and logits are multiplied by constants of the checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .dense import DenseDecoder, Traits


class GraniteDecoder(DenseDecoder):
    """What the two share around their layers: scaled embeddings."""

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.embedding_multiplier)


class GraniteForCausalLM(GraniteDecoder):
    """Granite 3."""

    divides_logits: ClassVar[bool] = True

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

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / float(self.config.logits_scaling)


class HyperCLOVAXForCausalLM(GraniteDecoder):
    """HyperCLOVA X SEED: Granite with optional norms behind each part, and logits that are multiplied."""

    divides_logits: ClassVar[bool] = True

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        return Traits(
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            scale=config.attention_multiplier,
            activation=config.hidden_act,
            mlp_bias=config.mlp_bias,
            after=("post_norm1", "post_norm2") if config.use_post_norm else ("", ""),
            branch_scale=config.residual_multiplier,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * float(self.config.logits_scaling)
