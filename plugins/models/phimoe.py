"""Phi-3.5-MoE: LayerNorm with biases, and two experts a token that a sparsemixer chooses one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, Model, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, DecoderLayer, RotaryAttention, head_shape
from .mixtral import mixtral_experts


class PhimoeForCausalLM(Decoder):
    """LayerNorm, rotary positions, grouped-query attention over a window, routed SwiGLU experts, a head with a bias."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config = build.config
        Model.__init__(self, setup, options)
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        rotary = RotaryEmbedding(build, head_shape(config)[2])
        self.embedding = build.embedding("model.embed_tokens", vocab_size, hidden_size)
        self.layers = build.layers(
            config.num_hidden_layers, lambda index: _layer(build, f"model.layers.{index}", rotary)
        )
        self.norm = final_layer_norm(
            build, build.final_norm("model.norm", hidden_size, eps=config.rms_norm_eps, kind="layer")
        )
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = build.head("lm_head", hidden_size, vocab_size, tied=tied, bias=config.lm_head_bias)


class AddNorm(nn.Module):
    """Makes of a norm of x one that adds a residual first, as `build.norm` gives."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual); all [T, hidden_size]."""
        if residual is None:
            return self.norm(x)
        total = x + residual
        return self.norm(total), total


def final_layer_norm(build: Build, norm: nn.Module) -> nn.Module:
    """What `build.final_norm` gave, as one that adds a residual first; the end of another stage does so already."""
    return AddNorm(norm) if build.stage.last else norm


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name, bias, window = f"{prefix}.self_attn", config.attention_bias, config.sliding_window or 0

    def norm(name: str) -> nn.Module:
        return AddNorm(build.norm(f"{prefix}.{name}", config.hidden_size, eps=config.rms_norm_eps, kind="layer"))

    attention = RotaryAttention(
        build.attention_input(name, config.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, config.hidden_size, bias=bias, shard="row"),
    )
    if config.num_experts_per_tok != 2:
        raise ValueError(f"num_experts_per_tok is {config.num_experts_per_tok}; a sparsemixer's choice is of 2 experts")
    router = RouterSpec(
        config.num_local_experts, 2, "sparsemixer", renormalize=False, jitter=config.router_jitter_noise
    )
    experts = mixtral_experts(build, f"{prefix}.block_sparse_moe", router, reduce=True)
    return DecoderLayer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), experts)
