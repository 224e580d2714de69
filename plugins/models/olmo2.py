"""OLMo 2: norms behind each part instead of before it; queries and keys are normalised over all heads together."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import HeadsNorm, RotaryEmbedding

from .decoder import Decoder, GatedMLP, RotaryAttention, SandwichLayer, gate_activation, head_shape
from .norms import Unnormed


class Olmo2ForCausalLM(Decoder):
    """RMSNorm behind each part, rotary positions, attention with normalised queries and keys, SwiGLU."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary), partial=False)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name, bias = f"{prefix}.self_attn", config.attention_bias
    attention = RotaryAttention(
        build.attention_input(name, hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.o_proj", num_heads * head_dim, hidden_size, bias=bias, shard="row"),
        norms=(
            HeadsNorm(build, f"{name}.q_norm", num_heads, head_dim, eps=eps),
            HeadsNorm(build, f"{name}.k_norm", num_kv_heads, head_dim, eps=eps),
        ),
    )
    activation = gate_activation(build, config.hidden_act)
    return SandwichLayer(
        (Unnormed(), build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps)),
        attention,
        (Unnormed(), build.norm(f"{prefix}.post_feedforward_layernorm", hidden_size, eps=eps)),
        GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, reduce=True),
    )
