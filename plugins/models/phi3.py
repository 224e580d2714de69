"""Phi-3 and Phi-4: Mistral with query, key and value, and gate and up, each joined in one tensor of the checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, DecoderLayer, GatedMLP, RotaryAttention, gate_activation, head_shape


class Phi3ForCausalLM(Decoder):
    """RMSNorm, rotary positions of a part of each head, grouped-query attention over a window, SwiGLU."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, eps, window = config.hidden_size, config.rms_norm_eps, config.sliding_window or 0
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name = f"{prefix}.self_attn"
    attention = RotaryAttention(
        build.attention_input(name, hidden_size, num_heads, num_kv_heads, head_dim, names=("qkv_proj",)),
        rotary,
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, hidden_size, shard="row", reduce=False),
    )
    activation = gate_activation(build, config.hidden_act)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        attention,
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, joined="gate_up_proj"),
    )
