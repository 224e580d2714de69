"""Hunyuan-A13B and HY3: an expert for all tokens beside the routed ones; the first norms queries after turning them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, normed_linear

from .decoder import Decoder, RotaryAttention, gate_activation, head_shape
from .mixture import SharedMLP, attention_part, dense, pre_normed, routed


class HunYuanMoEV1ForCausalLM(Decoder):
    """RMSNorm, rotary positions, queries and keys normalised behind them, routed SwiGLU experts with a shared one."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        _check(build.config)
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


class HYV3ForCausalLM(Decoder):
    """RMSNorm, normalised queries and keys, SwiGLU experts with shared ones, chosen by sigmoids with a correction."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer_v3(build, prefix, index, rotary))
        # a layer behind the last one predicts more tokens ahead
        self.ignores = (*self.ignores, rf"model\.layers\.{build.config.num_hidden_layers}\..*")  # type: ignore[misc]


class TurnedAttention(RotaryAttention):
    """Queries and keys are turned, then each head of them is normalised."""

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, residual)
        query, key = self.rotary(positions, query, key)
        query, key = self.query_norm(query), self.key_norm(key)
        return self.output(self.attention(query, key, value, step)), residual


def _check(config: Any) -> None:
    """Raises `ValueError` for what Hunyuan's configuration may ask for and its checkpoints do not."""
    if getattr(config, "use_cla", False):
        raise ValueError("use_cla is true; layers of Hunyuan that share keys and values are not supported: false")
    size = config.intermediate_size
    for name, only in (("moe_intermediate_size", size), ("num_shared_expert", 1), ("num_experts", config.num_experts)):
        found = getattr(config, name, only)
        for value in found if isinstance(found, Sequence) else [found]:
            if value != only:
                raise ValueError(f"{name} is {value} in a layer; Hunyuan's experts are served with {name} {only}")


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    bias, norms = config.attention_bias, ("query_layernorm", "key_layernorm")
    attention = attention_part(
        build, f"{prefix}.self_attn", rotary, bias=bias, output_bias=bias, norms=norms, kind=TurnedAttention
    )
    size, top_k = config.intermediate_size, config.moe_topk
    shared = SharedMLP(build, f"{prefix}.mlp.shared_mlp", size, gate_activation(build, config.hidden_act))
    router = RouterSpec(config.num_experts, top_k if isinstance(top_k, int) else top_k[index])
    mlp = routed(build, f"{prefix}.mlp", router, size, shared, gate="gate.wg", wide=True)
    return pre_normed(build, prefix, attention, mlp)


def _layer_v3(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    bias, name = config.attention_bias, f"{prefix}.mlp"
    attention = attention_part(
        build, f"{prefix}.self_attn", rotary, bias=bias, output_bias=bias, norms=("q_norm", "k_norm")
    )
    if config.mlp_layer_types[index] != "sparse":
        return pre_normed(build, prefix, attention, dense(build, name, bias=config.mlp_bias))
    size, activation = config.moe_intermediate_size, gate_activation(build, config.hidden_act)
    count = config.num_shared_experts
    shared = SharedMLP(build, f"{name}.shared_mlp", size * count, activation, bias=config.mlp_bias) if count else None
    router = RouterSpec(
        config.num_experts, config.num_experts_per_tok, "sigmoid", corrected=True, scale=config.router_scaling_factor
    )
    mlp = routed(build, name, router, size, shared, gate="router.gate", correction="expert_bias", wide=True)
    return pre_normed(build, prefix, attention, mlp)
