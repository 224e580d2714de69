"""Llama 4, text: chunks of attention with rotary positions, whole attention without, experts that scale their input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router, normed_linear

from .decoder import Decoder, RotaryAttention, gate_activation, head_shape
from .mixture import SharedMLP, SparseMLP, dense, pre_normed
from .positions import Unturned


class Llama4ForCausalLM(Decoder):
    """RMSNorm, interleaved rotary positions in chunked layers, SwiGLU in some layers with one routed expert a token."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2], interleaved=True)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text part of checkpoints that see pictures too."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^language_model\.", ""), *Llama4ForCausalLM.renames)
    ignores: ClassVar[Sequence[str]] = (
        *Llama4ForCausalLM.ignores,
        r"vision_model\..*",
        r"multi_modal_projector\..*",
    )


class ChunkedAttention(RotaryAttention):
    """Queries and keys are turned and then brought to length √D, or left as they are and queries grow with position.

    `ones` [D] is the weight of the norm; `temperature` is (`floor_scale`, `attn_scale`).
    """

    ones: Tensor | None
    eps: float
    temperature: tuple[float, float] | None
    ops: Any

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, residual)
        query, key = self.rotary(positions, query, key)
        if self.ones is not None:
            query, key = (self.ops.rms_norm(part, self.ones, self.eps) for part in (query, key))
        if self.temperature is not None:
            every, factor = self.temperature
            growth = torch.log1p(torch.floor((positions[0].float() + 1.0) / every)) * factor + 1.0
            query = (query * growth[:, None, None]).to(query.dtype)
        return self.output(self.attention(query, key, value, step)), residual


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    name = f"{prefix}.feed_forward"
    if index in config.moe_layers:
        return pre_normed(build, prefix, _attention(build, f"{prefix}.self_attn", index, rotary), _experts(build, name))
    mlp = dense(build, name, config.intermediate_size_mlp)
    return pre_normed(build, prefix, _attention(build, f"{prefix}.self_attn", index, rotary), mlp)


def _attention(build: Build, name: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, bias, (num_heads, num_kv_heads, head_dim) = (
        config.hidden_size,
        config.attention_bias,
        head_shape(config),
    )
    turns = bool(config.no_rope_layers[index])  # in spite of its name: whether a layer has positions
    chunk = config.attention_chunk_size if config.layer_types[index] == "chunked_attention" else 0
    attention = ChunkedAttention(
        build.attention_input(name, hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary if turns else Unturned(),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, chunk=chunk or 0),
        build.linear(f"{name}.o_proj", num_heads * head_dim, hidden_size, bias=bias, shard="row", reduce=False),
    )
    normed, tuned = config.use_qk_norm and turns, config.attn_temperature_tuning and not turns
    attention.ones = torch.ones(head_dim, dtype=build.dtype, device=build.device) if normed else None
    attention.eps, attention.ops = config.rms_norm_eps, build.ops
    attention.temperature = (float(config.floor_scale), float(config.attn_scale)) if tuned else None
    return attention


def _experts(build: Build, prefix: str) -> SparseMLP:
    config = build.config
    number, top_k, size = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
    experts = ExpertSpec(
        number,
        config.hidden_size,
        size,
        top_k,
        activation=config.hidden_act,
        weights_on_input=True,
        transposed=True,
    )
    shared = SharedMLP(build, f"{prefix}.shared_expert", size, gate_activation(build, config.hidden_act))
    router = RouterSpec(number, top_k, "sigmoid", renormalize=False)
    return SparseMLP(
        Router(build, f"{prefix}.router", config.hidden_size, router),
        build.experts(f"{prefix}.experts", experts, shared, reduce=False),
    )
