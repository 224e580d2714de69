"""Bamba and Granite 4: Mamba-2 mixers in most layers, attention in the others, with or without positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import Mamba2Mixer, RotaryEmbedding, Router, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation, head_shape
from .hybrid import bamba_spec, layer_kind, plain_attention
from .mixture import Scaled, SharedMLP
from .positions import Unturned


class BambaForCausalLM(Decoder):
    """RMSNorm, Mamba-2 or attention with a partial rope, SwiGLU."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(^|model\.)final_layernorm\.", "model.norm."),
        *Decoder.renames,
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _bamba(build, prefix, index, rotary))


class GraniteMoeHybridForCausalLM(Decoder):
    """Granite 4: as Bamba, with Granite's multipliers, and experts beside a shared one where there are any."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.(layer\.)?weight$", ".block_sparse_moe.router.weight"),
        (r"\.shared_mlp\.output_linear\.", ".shared_mlp.down_proj."),
        *Decoder.renames,
    )
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        kind = build.config.position_embedding_type
        if kind not in (None, "rope", "nope"):
            raise ValueError(f"no position_embedding_type {kind!r}; there are: null, nope, rope")
        rotary = RotaryEmbedding(build, head_shape(build.config)[2]) if kind == "rope" else Unturned()
        super().__init__(setup, options, make_layer=lambda prefix, index: _granite(build, prefix, index, rotary))

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.embedding_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / float(self.config.logits_scaling)


class GraniteSparseMLP(nn.Module):
    """A norm, a router and the experts that it prefers for each token, beside a gated MLP that all tokens have."""

    def __init__(self, build: Build, prefix: str, shared_prefix: str) -> None:
        super().__init__()
        config = build.config
        count, top_k, size = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
        self.router = Router(build, f"{prefix}.router", config.hidden_size, RouterSpec(count, top_k))
        spec = ExpertSpec(count, config.hidden_size, size, top_k, activation=config.hidden_act)
        gate, width = gate_activation(build, config.hidden_act), config.shared_intermediate_size
        shared = SharedMLP(build, shared_prefix, width, gate, joined="input_linear")
        self.experts = build.experts(f"{prefix}.experts", spec, shared, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _bamba(build: Build, prefix: str, index: int, rotary: nn.Module) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    part: nn.Module
    if index in (config.attn_layer_indices or ()):
        part = plain_attention(build, f"{prefix}.self_attn", rotary, bias=config.attention_bias)
    else:
        part = Mamba2Mixer(build, f"{prefix}.mamba", bamba_spec(config))
    activation = gate_activation(build, config.hidden_act)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        part,
        build.norm(f"{prefix}.pre_ff_layernorm", hidden_size, eps=eps, partial=True),
        GatedMLP(build, f"{prefix}.feed_forward", config.intermediate_size, activation, bias=config.mlp_bias),
    )


def _granite(build: Build, prefix: str, index: int, rotary: nn.Module) -> nn.Module:
    config = build.config
    hidden_size, eps, factor = config.hidden_size, config.rms_norm_eps, float(config.residual_multiplier)
    part: nn.Module
    if layer_kind(config.layer_types[index], "linear_attention", "full_attention") == "full_attention":
        scale = float(config.attention_multiplier)
        part = plain_attention(build, f"{prefix}.self_attn", rotary, scale=scale, bias=config.attention_bias)
    else:
        part = Mamba2Mixer(build, f"{prefix}.mamba", bamba_spec(config))
    shared = f"{prefix}.shared_mlp"
    if config.num_local_experts:
        mlp: nn.Module = GraniteSparseMLP(build, f"{prefix}.block_sparse_moe", shared)
    else:
        activation, size = gate_activation(build, config.hidden_act), config.shared_intermediate_size
        mlp = GatedMLP(build, shared, size, activation, joined="input_linear")
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        Scaled(part, factor),
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        Scaled(mlp, factor),
    )
