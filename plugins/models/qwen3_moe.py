"""Qwen3-MoE: Qwen3 attention; the feed-forward part of most layers is a set of routed experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, head_shape
from .mixture import SparseMLP, dense, pre_normed, routed
from .qwen3 import qwen3_attention


class Qwen3MoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, normalised queries and keys, top-k routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


def is_sparse(config: Any, index: int) -> bool:
    """Whether layer `index` has experts; Qwen2-MoE says so in the same way."""
    if index in config.mlp_only_layers or config.num_experts == 0:
        return False
    return bool((index + 1) % config.decoder_sparse_step == 0)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    window = (config.sliding_window or 0) if config.use_sliding_window else 0
    attention = qwen3_attention(build, f"{prefix}.self_attn", window, rotary)
    mlp = qwen3_experts(build, f"{prefix}.mlp") if is_sparse(config, index) else dense(build, f"{prefix}.mlp")
    return pre_normed(build, prefix, attention, mlp)


def qwen3_experts(build: Build, prefix: str) -> SparseMLP:
    """Experts without a shared one."""
    config = build.config
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return routed(build, prefix, router, config.moe_intermediate_size)
