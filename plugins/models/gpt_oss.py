"""gpt-oss: sinks in every layer, windows in every second one, biases everywhere, experts with a clamped gate."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router

from .decoder import Decoder, head_shape, sliding_window
from .mixture import SparseMLP, attention_part, pre_normed


class GptOssForCausalLM(Decoder):
    """RMSNorm, rotary positions, grouped-query attention with sinks, routed experts with biases."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    bias, window = config.attention_bias, sliding_window(config, index)
    attention = attention_part(
        build, f"{prefix}.self_attn", rotary, bias=bias, output_bias=bias, window=window, sinks=True
    )
    return pre_normed(build, prefix, attention, _experts(build, f"{prefix}.mlp"))


def _experts(build: Build, prefix: str) -> SparseMLP:
    """(up + 1) · gate · logistic(alpha · gate), both clamped; gate and up take turns in the checkpoint's columns."""
    config = build.config
    number, top_k = config.num_local_experts, config.num_experts_per_tok
    experts = ExpertSpec(
        number,
        config.hidden_size,
        config.intermediate_size,
        top_k,
        activation=config.hidden_act,
        bias=True,
        alpha=config.swiglu_alpha,
        shift=1.0,
        limit=config.swiglu_limit,
        transposed=True,
        interleaved=True,
    )
    router = Router(build, f"{prefix}.router", config.hidden_size, RouterSpec(number, top_k), bias=True)
    return SparseMLP(router, build.experts(f"{prefix}.experts", experts, reduce=False))
