"""Jamba: Mamba-1 mixers with normed steps, B and C in most layers, attention without positions, experts in some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import MambaMixer, MambaSpec, Router, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation
from .hybrid import plain_attention
from .positions import Unturned


class JambaForCausalLM(Decoder):
    """RMSNorm, Mamba-1 or attention by a period, SwiGLU or experts by another."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(^|model\.)final_layernorm\.", "model.norm."),
        *Decoder.renames,
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index))


class SparseMLP(nn.Module):
    """A norm, a router whose weights are not renormalised, and the experts that it prefers for each token."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        count, top_k = config.num_experts, config.num_experts_per_tok
        router = RouterSpec(count, top_k, renormalize=False)
        self.router = Router(build, f"{prefix}.router", config.hidden_size, router)
        spec = ExpertSpec(count, config.hidden_size, config.intermediate_size, top_k, activation=config.hidden_act)
        self.experts = build.experts(f"{prefix}.experts", spec, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _mixer(build: Build, prefix: str) -> nn.Module:
    config = build.config
    if config.hidden_act != "silu":
        raise ValueError(f"Mamba's convolution is followed by 'silu', not by {config.hidden_act!r}")
    rank = config.mamba_dt_rank
    spec = MambaSpec(
        config.hidden_size,
        config.mamba_expand * config.hidden_size,
        config.mamba_d_state,
        -(-config.hidden_size // 16) if rank == "auto" else int(rank),
        config.mamba_d_conv,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
    )
    sizes = {"dt": spec.step_rank, "b": spec.state_size, "c": spec.state_size}
    norms = [build.norm(f"{prefix}.{part}_layernorm", size, eps=config.rms_norm_eps) for part, size in sizes.items()]
    return MambaMixer(build, prefix, spec, norms)


def _layer(build: Build, prefix: str, index: int) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    attends = index % config.attn_layer_period == config.attn_layer_offset
    part = plain_attention(build, f"{prefix}.self_attn", Unturned()) if attends else _mixer(build, f"{prefix}.mamba")
    name = f"{prefix}.feed_forward"
    if config.num_experts > 1 and index % config.expert_layer_period == config.expert_layer_offset:
        mlp: nn.Module = SparseMLP(build, name)
    else:
        mlp = GatedMLP(build, name, config.intermediate_size, gate_activation(build, config.hidden_act))
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        part,
        build.norm(f"{prefix}.pre_ff_layernorm", hidden_size, eps=eps, partial=True),
        mlp,
    )
