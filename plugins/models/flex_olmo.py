"""FlexOlmo: OLMo 2's layer, with norms behind each part, around OLMoE's attention and experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, SandwichLayer, head_shape
from .mixture import routed
from .norms import Unnormed
from .olmoe import all_heads_normed


class FlexOlmoForCausalLM(Decoder):
    """RMSNorm behind each part, rotary positions, attention with normalised queries and keys, routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary), partial=False)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)

    def norm(name: str) -> nn.Module:
        return build.norm(f"{prefix}.{name}", config.hidden_size, eps=config.rms_norm_eps)

    return SandwichLayer(
        (Unnormed(), norm("post_attention_layernorm")),
        all_heads_normed(build, f"{prefix}.self_attn", rotary, bias=config.attention_bias, reduce=True),
        (Unnormed(), norm("post_feedforward_layernorm")),
        routed(build, f"{prefix}.mlp", router, config.intermediate_size, reduce=True),
    )
