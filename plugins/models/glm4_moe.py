"""GLM-4.5 to 4.7, and families built like it: DeepSeek-V3's router, and a shared expert, around Llama's attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, gate_activation, head_shape, sliding_window
from .mixture import SharedMLP, attention_part, dense, pre_normed, routed


class Glm4MoeForCausalLM(Decoder):
    """RMSNorm, rotary positions of a part of each head, routed SwiGLU experts behind the first, dense layers."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: self.make_layer(build, prefix, index, rotary))
        # a layer behind the last one predicts more tokens ahead
        self.ignores = (*self.ignores, rf"model\.layers\.{build.config.num_hidden_layers}\..*")  # type: ignore[misc]

    @staticmethod
    def make_layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        """Layer `index`."""
        config = build.config
        norms = ("q_norm", "k_norm") if config.use_qk_norm else None
        attention = attention_part(build, f"{prefix}.self_attn", rotary, bias=config.attention_bias, norms=norms)
        sparse = index >= config.first_k_dense_replace
        return pre_normed(build, prefix, attention, grouped_experts(build, f"{prefix}.mlp", sparse=sparse))


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """As GLM-4.5, with experts in all layers, and queries and keys as they are."""

    @staticmethod
    def make_layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        """Layer `index`."""
        attention = attention_part(build, f"{prefix}.self_attn", rotary, bias=build.config.attention_bias)
        return pre_normed(build, prefix, attention, grouped_experts(build, f"{prefix}.mlp"))


class Dots1ForCausalLM(Glm4MoeForCausalLM):
    """As GLM-4.5, with normalised queries and keys, over a window in some layers."""

    @staticmethod
    def make_layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        """Layer `index`."""
        config = build.config
        bias = config.attention_bias
        attention = attention_part(
            build,
            f"{prefix}.self_attn",
            rotary,
            bias=bias,
            output_bias=bias,
            window=sliding_window(config, index),
            norms=("q_norm", "k_norm"),
        )
        sparse = index >= (config.first_k_dense_replace or 0)
        return pre_normed(build, prefix, attention, grouped_experts(build, f"{prefix}.mlp", sparse=sparse))


def grouped_router(config: Any, num_experts: int) -> RouterSpec:
    """DeepSeek-V3's: sigmoids, a bias that counts for choosing only, the best groups by their two best experts."""
    return RouterSpec(
        num_experts,
        config.num_experts_per_tok,
        "sigmoid",
        renormalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        corrected=True,
        num_groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        group_score="top2",
    )


def grouped_experts(
    build: Build, prefix: str, *, sparse: bool = True, shared: str = "n_shared_experts", correction: str = ""
) -> nn.Module:
    """Experts that `grouped_router` chooses, and as many shared ones as the configuration's `shared`; or a dense part.

    `correction` names the router's bias where it lies elsewhere than in GLM's checkpoints.
    """
    config = build.config
    if not sparse:
        return dense(build, prefix)
    size, count = config.moe_intermediate_size, getattr(config, shared, None) or 0
    number = getattr(config, "n_routed_experts", None) or config.num_experts
    always = None
    if count:
        activation = gate_activation(build, config.hidden_act)
        always = SharedMLP(build, f"{prefix}.shared_experts", size * count, activation)
    spec = grouped_router(config, number)
    return routed(build, prefix, spec, size, always, wide=True, correction=correction)
