"""LFM2 and LFM2-MoE: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router, ShortConv, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation, head_shape
from .hybrid import layer_kind, plain_attention


class Lfm2ForCausalLM(Decoder):
    """RMSNorm, short convolutions and attention with normalised queries and keys, SwiGLU."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(^|model\.)embedding_norm\.", "model.norm."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"\.w2\.", ".down_proj."),
        *Decoder.renames,
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: _layer(build, prefix, index, rotary, self.feed_forward),
            norm=build.final_norm("model.norm", build.config.hidden_size, eps=build.config.norm_eps, partial=True),
        )

    @staticmethod
    def feed_forward(build: Build, prefix: str, index: int) -> nn.Module:
        """The feed-forward part called `prefix` of layer `index`."""
        del index
        return GatedMLP(build, prefix, _inner_size(build.config), gate_activation(build, "silu"))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """As LFM2, with routed experts behind the first layers."""

    @staticmethod
    def feed_forward(build: Build, prefix: str, index: int) -> nn.Module:
        config = build.config
        if index < config.num_dense_layers:
            return GatedMLP(build, prefix, config.intermediate_size, gate_activation(build, "silu"))
        return BiasedSparseMLP(build, prefix)


class BiasedSparseMLP(nn.Module):
    """A norm, a router with sigmoid scores and a bias for choosing, and the experts that it prefers for each token."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        count, top_k, size = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        spec = RouterSpec(
            count,
            top_k,
            "sigmoid",
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            corrected=config.use_expert_bias,
        )
        self.router = Router(build, f"{prefix}.gate", config.hidden_size, spec, correction=f"{prefix}.expert_bias")
        experts = ExpertSpec(count, config.hidden_size, size, top_k)
        self.experts = build.experts(f"{prefix}.experts", experts, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _inner_size(config: Any) -> int:
    """`intermediate_size`, or what `block_auto_adjust_ff_dim` makes of it."""
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * size) // multiple) * multiple


def _layer(build: Build, prefix: str, index: int, rotary: nn.Module, feed_forward: Any) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.norm_eps
    if layer_kind(config.layer_types[index], "conv", "full_attention") == "conv":
        part: nn.Module = ShortConv(build, f"{prefix}.conv", hidden_size, config.conv_L_cache, bias=config.conv_bias)
    else:
        name, size = f"{prefix}.self_attn", head_shape(config)[2]
        norms = (
            build.norm(f"{name}.q_layernorm", size, eps=eps),
            build.norm(f"{name}.k_layernorm", size, eps=eps),
        )
        part = plain_attention(build, name, rotary, output="out_proj", norms=norms)
    return DecoderLayer(
        build.norm(f"{prefix}.operator_norm", hidden_size, eps=eps, partial=True),
        part,
        build.norm(f"{prefix}.ffn_norm", hidden_size, eps=eps, partial=True),
        feed_forward(build, f"{prefix}.feed_forward", index),
    )
