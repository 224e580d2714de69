"""GLM-4: neighbouring features of half of each head are turned; gate and up are one tensor of the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .dense import DenseDecoder, Rope, Traits


class GlmForCausalLM(DenseDecoder):
    """GLM-4-9B and GLM-Edge."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        del index
        rope = Rope(interleaved=True, partial=0.5)
        return Traits(bias=config.attention_bias, rope=rope, activation=config.hidden_act, mlp="joined")


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms behind each part as well."""

    @classmethod
    def traits(cls, config: Any, index: int) -> Traits:
        after = ("post_self_attn_layernorm", "post_mlp_layernorm")
        return replace(super().traits(config, index), after=after)
