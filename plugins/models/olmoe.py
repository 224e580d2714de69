"""OLMoE: Llama's layer with routed experts; queries and keys are normalised over all heads together, and may be cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelSetup, RouterSpec
from frame.layers import HeadsNorm, RotaryEmbedding, normed_linear

from .decoder import Decoder, RotaryAttention, head_shape
from .mixture import pre_normed, routed


class OlmoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, attention with normalised queries and keys, top-k routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))


class CutAttention(RotaryAttention):
    """Queries, keys and values, the first two normed if there are `norms`, are brought within ±`bound` and turned."""

    bound: float

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, residual)
        if self.norms is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (part.clamp(-self.bound, self.bound) for part in (query, key, value))
        query, key = self.rotary(positions, query, key)
        return self.output(self.attention(query, key, value, step)), residual


def all_heads_normed(
    build: Build, name: str, rotary: nn.Module, *, bias: bool, reduce: bool = False
) -> RotaryAttention:
    """Attention called `name` whose queries and keys are normalised over all heads; FlexOlmo's and MiniMax's too."""
    config = build.config
    num_heads, num_kv_heads, head_dim = head_shape(config)
    bound = getattr(config, "clip_qkv", None)
    made = (RotaryAttention if bound is None else CutAttention)(
        build.attention_input(name, config.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.o_proj", num_heads * head_dim, config.hidden_size, bias=bias, shard="row", reduce=reduce),
        norms=(
            HeadsNorm(build, f"{name}.q_norm", num_heads, head_dim, eps=config.rms_norm_eps),
            HeadsNorm(build, f"{name}.k_norm", num_kv_heads, head_dim, eps=config.rms_norm_eps),
        ),
    )
    if isinstance(made, CutAttention) and bound is not None:
        made.bound = float(bound)
    return made


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    attention = all_heads_normed(build, f"{prefix}.self_attn", rotary, bias=config.attention_bias)
    router = RouterSpec(config.num_experts, config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return pre_normed(build, prefix, attention, routed(build, f"{prefix}.mlp", router, config.intermediate_size))
