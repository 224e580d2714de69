"""Mellum 2: Qwen3-MoE with rotary positions by the kind of layer, and a list of which layers have experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, head_shape, sliding_window
from .mixture import dense, pre_normed
from .qwen3 import qwen3_attention
from .qwen3_moe import qwen3_experts


class MellumForCausalLM(Decoder):
    """RMSNorm, rotary positions, normalised queries and keys over windows, routed SwiGLU experts."""

    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r"mtp\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config = build.config
        head_dim = head_shape(config)[2]
        turns = {kind: RotaryEmbedding(build, head_dim, layer_type=kind) for kind in sorted(set(config.layer_types))}

        def make_layer(prefix: str, index: int) -> nn.Module:
            return _layer(build, prefix, index, turns[config.layer_types[index]])

        super().__init__(setup, options, make_layer=make_layer)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    attention = qwen3_attention(build, f"{prefix}.self_attn", sliding_window(config, index), rotary)
    sparse = config.mlp_layer_types[index] == "sparse"
    return pre_normed(
        build, prefix, attention, qwen3_experts(build, f"{prefix}.mlp") if sparse else dense(build, f"{prefix}.mlp")
    )
