"""K-EXAONE: Exaone 4's attention, with positions in windowed layers only, and DeepSeek-V3's choice of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, head_shape, sliding_window
from .glm4_moe import grouped_experts
from .mixture import attention_part, pre_normed
from .positions import Unturned


class ExaoneMoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, normalised queries and keys over windows, routed SwiGLU experts with shared ones."""

    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r"mtp\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    windowed = config.layer_types[index] == "sliding_attention"
    turns = rotary if windowed or config.sliding_window is None else Unturned()
    window, norms = sliding_window(config, index), ("q_norm", "k_norm")
    attention = attention_part(build, f"{prefix}.self_attn", turns, window=window, norms=norms)
    mlp = grouped_experts(
        build,
        f"{prefix}.mlp",
        sparse=config.mlp_layer_types[index] == "sparse",
        shared="num_shared_experts",
        correction="e_score_correction_bias",
    )
    return pre_normed(build, prefix, attention, mlp)
