"""Falcon-H1: a Mamba-2 mixer and attention side by side in every layer, and a multiplier at every joint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelSetup
from frame.layers import Mamba2Mixer, RotaryEmbedding

from .decoder import Decoder, DecoderLayer, gate_activation, head_shape
from .hybrid import bamba_spec


class FalconH1ForCausalLM(Decoder):
    """RMSNorm, both mixers of the same normed input, SwiGLU."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"(^|model\.)final_layernorm\.", "model.norm."),
        *Decoder.renames,
    )
    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r".*\.mup_vector")
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.embedding_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * float(self.config.lm_head_multiplier)


class ParallelMixers(nn.Module):
    """A norm, then Mamba-2 and attention of what it gives, added."""

    def __init__(self, build: Build, prefix: str, rotary: nn.Module) -> None:
        super().__init__()
        config = build.config
        heads = num_heads, _, head_dim = head_shape(config)
        name, hidden_size, bias = f"{prefix}.self_attn", config.hidden_size, config.attention_bias
        features = {
            "gated_norm": bool(config.mamba_rms_norm),
            "gate_last": bool(config.mamba_norm_before_gate),
            "output_bias": config.projectors_bias,
        }
        self.mixer = Mamba2Mixer(build, f"{prefix}.mamba", bamba_spec(config, **features))
        self.inputs = build.attention_input(name, hidden_size, *heads, bias=bias)
        self.attention, self.rotary = build.attention(name, *heads, scale=head_dim**-0.5), rotary
        self.output = build.linear(
            f"{name}.o_proj", num_heads * head_dim, hidden_size, bias=bias, shard="row", reduce=False
        )
        parts = [
            torch.full((count,), float(factor))
            for count, factor in zip(self.mixer.part_sizes, config.ssm_multipliers, strict=True)
        ]
        scale = (torch.cat(parts) * config.ssm_in_multiplier).to(build.device, build.dtype)
        self.register_buffer("mixer_scale", scale, persistent=False)
        self.key_factor = float(config.key_multiplier)
        self.factors = tuple(
            float(one)
            for one in (config.attention_in_multiplier, config.attention_out_multiplier, config.ssm_out_multiplier)
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        normed, residual = (norm(hidden), hidden) if residual is None else norm(hidden, residual)
        into, out_of_attention, out_of_mixer = self.factors
        mixed = self.mixer.mix(self.mixer.inputs(normed) * self.mixer_scale, step)
        query, key, value = self.inputs(normed * into)
        query, key = self.rotary(positions, query, key * self.key_factor)
        attended = self.output(self.attention(query, key, value, step))
        return mixed * out_of_mixer + attended * out_of_attention, residual


class MultipliedMLP(nn.Module):
    """A norm, then down(gate(x · a) · up(x)) · b."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up = build.linear(prefix, hidden_size, 2 * size, bias=bias, shard="column", parts=parts)
        self.down = build.linear(f"{prefix}.down_proj", size, hidden_size, bias=bias, shard="row", reduce=False)
        self.activation = gate_activation(build, config.hidden_act)
        self.gate_factor, self.down_factor = (float(one) for one in config.mlp_multipliers)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        normed, residual = norm(hidden, residual)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return self.down(self.activation(torch.cat((gate * self.gate_factor, up), -1))) * self.down_factor, residual


def _layer(build: Build, prefix: str, rotary: nn.Module) -> nn.Module:
    hidden_size, eps = build.config.hidden_size, build.config.rms_norm_eps
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        ParallelMixers(build, prefix, rotary),
        build.norm(f"{prefix}.pre_ff_layernorm", hidden_size, eps=eps, partial=True),
        MultipliedMLP(build, f"{prefix}.feed_forward"),
    )
