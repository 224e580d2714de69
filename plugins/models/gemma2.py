"""Gemma 2: every second layer sees a window; norms before and after each part; scores and logits are soft-capped."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, GatedMLP, RotaryAttention, SandwichLayer, gate_activation, head_shape, sliding_window


class GemmaDecoder(Decoder):
    """What all Gemmas share around their layers: embeddings scaled by √hidden_size, capped logits, norms + 1."""

    divides_logits: ClassVar[bool] = True

    def embed(self, input_ids: Tensor) -> Tensor:
        """The scale is rounded to the embedding's dtype, as the checkpoints were trained."""
        rows = super().embed(input_ids)
        return rows * torch.tensor(self.config.hidden_size**0.5, dtype=rows.dtype).item()

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), getattr(self.config, "final_logit_softcapping", None)
        return cap * self.ops.map_rows(torch.tanh, logits / cap) if cap else logits


class Gemma2ForCausalLM(GemmaDecoder):
    """RMSNorm around each part, rotary positions, soft-capped attention with windows in turn, GeGLU."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: _layer(build, prefix, index, rotary),
            norm_offset=1.0,
            partial=False,
        )


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name, bias = f"{prefix}.self_attn", config.attention_bias
    attention = RotaryAttention(
        build.attention_input(name, config.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(
            name,
            num_heads,
            num_kv_heads,
            head_dim,
            scale=config.query_pre_attn_scalar**-0.5,
            window=sliding_window(config, index),
            soft_cap=config.attn_logit_softcapping or 0.0,
        ),
        build.linear(f"{name}.o_proj", num_heads * head_dim, config.hidden_size, bias=bias, shard="row"),
    )
    return sandwich(build, prefix, attention)


def sandwich(build: Build, prefix: str, attention: nn.Module) -> nn.Module:
    """Gemma's layer around `attention`: a GeGLU feed-forward part and four norms."""
    config = build.config

    def norm(name: str) -> nn.Module:
        return build.norm(f"{prefix}.{name}", config.hidden_size, eps=config.rms_norm_eps, offset=1.0)

    activation = gate_activation(build, config.hidden_activation)
    return SandwichLayer(
        (norm("input_layernorm"), norm("post_attention_layernorm")),
        attention,
        (norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")),
        GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, reduce=True),
    )
