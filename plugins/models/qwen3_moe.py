"""Qwen3-MoE: Qwen3 attention; the feed-forward part of most layers is a set of routed experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation, head_shape
from .qwen3 import qwen3_attention


class Qwen3MoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, normalised queries and keys, top-k routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


class SparseMLP(nn.Module):
    """A norm, a router, and the experts that it prefers for each token."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        router = RouterSpec(config.num_experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
        experts = ExpertSpec(
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts_per_tok,
            activation=config.hidden_act,
        )
        self.router = Router(build, f"{prefix}.gate", config.hidden_size, router)
        self.experts = build.experts(f"{prefix}.experts", experts, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _is_sparse(config: Any, index: int) -> bool:
    if index in config.mlp_only_layers or config.num_experts == 0:
        return False
    return bool((index + 1) % config.decoder_sparse_step == 0)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    window = (config.sliding_window or 0) if config.use_sliding_window else 0
    if _is_sparse(config, index):
        mlp: nn.Module = SparseMLP(build, f"{prefix}.mlp")
    else:
        activation = gate_activation(build, config.hidden_act)
        mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        qwen3_attention(build, f"{prefix}.self_attn", window, rotary),
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        mlp,
    )
