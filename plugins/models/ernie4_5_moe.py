"""ERNIE 4.5 with experts: neighbouring features are turned together; a bias corrects the choice of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, gate_activation, head_shape
from .mixture import SharedMLP, attention_part, dense, pre_normed, routed


class Ernie4_5_MoeForCausalLM(Decoder):
    """RMSNorm, interleaved rotary positions, grouped-query attention, routed SwiGLU experts with shared ones."""

    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r".*\bmtp_.*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2], interleaved=True)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))
        config = build.config
        if config.use_bias:
            tied = self.embedding if config.tie_word_embeddings else None
            self.head = build.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, bias=True)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    bias = bool(config.use_bias)
    attention = attention_part(build, f"{prefix}.self_attn", rotary, bias=bias, output_bias=bias)
    last = config.moe_layer_end_index
    within = config.moe_layer_start_index <= index <= (config.num_hidden_layers - 1 if last == -1 else last)
    if within and (index + 1) % config.moe_layer_interval == 0:
        mlp = _experts(build, f"{prefix}.mlp", bias=bias)
    else:
        mlp = dense(build, f"{prefix}.mlp", bias=bias)
    return pre_normed(build, prefix, attention, mlp)


def _experts(build: Build, prefix: str, *, bias: bool) -> nn.Module:
    config = build.config
    size, shared = config.moe_intermediate_size, None
    if count := config.moe_num_shared_experts:
        activation = gate_activation(build, config.hidden_act)
        shared = SharedMLP(build, f"{prefix}.shared_experts", size * count, activation, bias=bias)
    router = RouterSpec(config.moe_num_experts, config.moe_k, corrected=True, least_sum=config.moe_norm_min)
    correction = "moe_statics.e_score_correction_bias"
    return routed(build, prefix, router, size, shared, wide=True, correction=correction, correction_axes=2)
