"""Qwen2-MoE: Qwen2's attention; most layers have routed experts, and a shared one that a gate of its own weighs."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, gate_activation, head_shape, switched_window
from .mixture import SharedMLP, SparseMLP, attention_part, dense, pre_normed, routed
from .qwen3_moe import is_sparse


class Qwen2MoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, attention with biased inputs, top-k routed SwiGLU experts with a shared one."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    window = switched_window(config, index)
    attention = attention_part(build, f"{prefix}.self_attn", rotary, bias=config.qkv_bias, window=window)
    mlp = _experts(build, f"{prefix}.mlp") if is_sparse(config, index) else dense(build, f"{prefix}.mlp")
    return pre_normed(build, prefix, attention, mlp)


def _experts(build: Build, prefix: str) -> SparseMLP:
    config = build.config
    shared = SharedMLP(
        build,
        f"{prefix}.shared_expert",
        config.shared_expert_intermediate_size,
        gate_activation(build, config.hidden_act),
        scale=f"{prefix}.shared_expert_gate",
    )
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return routed(build, prefix, router, config.moe_intermediate_size, shared)
