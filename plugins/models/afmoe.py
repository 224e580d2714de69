"""AFMoE (Trinity): norms on both sides, a gate on what attention gives, positions in windowed layers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, normed_linear

from .decoder import Decoder, GatedMLP, RotaryAttention, SandwichLayer, gate_activation, head_shape, sliding_window
from .mixture import SharedMLP, routed
from .positions import Unturned


class AfmoeForCausalLM(Decoder):
    """RMSNorm around each part, gated attention with normalised queries and keys, routed and shared SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: _layer(build, prefix, index, rotary),
            partial=False,
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        rows = super().embed(input_ids)
        return rows * self.config.hidden_size**0.5 if self.config.mup_enabled else rows


class GatedAttention(RotaryAttention):
    """Attention times the logistic function of another projection of its input, before the output."""

    gate: nn.Module
    rows: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        (query, key, value), normed, residual = normed_linear(norm, self.inputs, hidden, residual)
        query, key = self.rotary(positions, query, key, self.norms)
        gate = self.rows(torch.sigmoid, self.gate(normed))
        return self.output(self.attention(query, key, value, step) * gate), residual


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, (num_heads, num_kv_heads, head_dim) = config.hidden_size, head_shape(config)
    name, bias, window = f"{prefix}.self_attn", config.attention_bias, sliding_window(config, index)

    def norm(name: str, size: int = hidden_size) -> nn.Module:
        return build.norm(f"{prefix}.{name}", size, eps=config.rms_norm_eps)

    attention = GatedAttention(
        build.attention_input(name, hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary if config.layer_types[index] == "sliding_attention" else Unturned(),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, hidden_size, bias=bias, shard="row"),
        norms=(norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim)),
    )
    attention.rows = build.ops.map_rows
    attention.gate = build.linear(f"{name}.gate_proj", hidden_size, num_heads * head_dim, shard="column")
    return SandwichLayer(
        (norm("input_layernorm"), norm("post_attention_layernorm")),
        attention,
        (norm("pre_mlp_layernorm"), norm("post_mlp_layernorm")),
        _mlp(build, f"{prefix}.mlp", sparse=index >= (config.num_dense_layers or 0)),
    )


def _mlp(build: Build, prefix: str, *, sparse: bool) -> nn.Module:
    config = build.config
    activation, size = gate_activation(build, config.hidden_act), config.moe_intermediate_size
    if not sparse:
        return GatedMLP(build, prefix, config.intermediate_size, activation, reduce=True)
    count = config.num_shared_experts
    shared = SharedMLP(build, f"{prefix}.shared_experts", size * count, activation) if count else None
    router = RouterSpec(
        config.num_experts, config.num_experts_per_tok, "sigmoid", corrected=True, scale=config.route_scale
    )
    return routed(build, prefix, router, size, shared, gate="router.gate", correction="expert_bias", reduce=True)
