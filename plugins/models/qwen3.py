"""Qwen3: queries and keys are normalised head by head before they are turned."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, DecoderLayer, GatedMLP, RotaryAttention, gate_activation, head_shape, switched_window


class Qwen3ForCausalLM(Decoder):
    """RMSNorm, rotary positions, grouped-query attention with normalised queries and keys, SwiGLU."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2], mixed_axes=True)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


def qwen3_attention(build: Build, name: str, window: int, rotary: RotaryEmbedding) -> nn.Module:
    """The attention block called `name`; Qwen3-MoE has the same."""
    config = build.config
    num_heads, num_kv_heads, head_dim = head_shape(config)
    bias = config.attention_bias
    return RotaryAttention(
        build.attention_input(name, config.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, config.hidden_size, bias=bias, shard="row", reduce=False),
        norms=(
            build.norm(f"{name}.q_norm", head_dim, eps=config.rms_norm_eps),
            build.norm(f"{name}.k_norm", head_dim, eps=config.rms_norm_eps),
        ),
    )


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    activation = gate_activation(build, config.hidden_act)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        qwen3_attention(build, f"{prefix}.self_attn", switched_window(config, index), rotary),
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation),
    )
