"""MiniMax-M2: Mixtral's experts, chosen by sigmoids with a correction; queries and keys normalised over all heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, head_shape
from .mixtral import mixtral_experts
from .mixture import pre_normed
from .olmoe import all_heads_normed


class MiniMaxM2ForCausalLM(Decoder):
    """RMSNorm, rotary positions of a part of each head, grouped-query attention, routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        score, shared = (getattr(build.config, name, None) for name in ("scoring_func", "shared_intermediate_size"))
        if score not in (None, "sigmoid"):
            raise ValueError(f"scoring_func is {score!r}; experts of MiniMax-M2 are chosen by 'sigmoid'")
        if shared:
            raise ValueError(f"shared_intermediate_size is {shared}; MiniMax-M2 is served without shared experts: 0")
        head_dim = head_shape(build.config)[2]
        # the published files say how many features turn, and not every class of transformers makes a part of that
        turned = getattr(build.config, "rotary_dim", None) or head_dim
        rotary = RotaryEmbedding(build, head_dim, partial=turned / head_dim)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    attention = all_heads_normed(build, f"{prefix}.self_attn", rotary, bias=False)
    router = RouterSpec(config.num_local_experts, config.num_experts_per_tok, "sigmoid", corrected=True)
    experts = mixtral_experts(build, f"{prefix}.block_sparse_moe", router, correction="e_score_correction_bias")
    return pre_normed(build, prefix, attention, experts)
