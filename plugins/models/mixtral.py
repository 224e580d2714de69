"""Mixtral: Mistral's attention; every feed-forward part is a set of routed experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router

from .decoder import Decoder, head_shape
from .mixture import SparseMLP, attention_part, pre_normed


class MixtralForCausalLM(Decoder):
    """RMSNorm, rotary positions, grouped-query attention over a window, top-k routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    window = build.config.sliding_window or 0
    attention = attention_part(build, f"{prefix}.self_attn", rotary, window=window)
    return pre_normed(build, prefix, attention, mixtral_experts(build, f"{prefix}.block_sparse_moe"))


def mixtral_experts(
    build: Build, prefix: str, router: RouterSpec | None = None, *, correction: str = "", reduce: bool = False
) -> SparseMLP:
    """Experts whose gate, up and down are w1, w3 and w2; by default their weights add up to one."""
    config = build.config
    top_k, number = config.num_experts_per_tok, config.num_local_experts
    spec = router or RouterSpec(number, top_k)
    experts = ExpertSpec(
        number,
        config.hidden_size,
        config.intermediate_size,
        top_k,
        activation=config.hidden_act,
        names=("w1", "w3", "w2"),
        joined=("gate_up_proj", "down_proj"),
    )
    return SparseMLP(
        Router(
            build,
            f"{prefix}.gate",
            config.hidden_size,
            spec,
            correction=f"{prefix}.{correction}" if correction else None,
        ),
        build.experts(f"{prefix}.experts", experts, reduce=reduce),
    )
