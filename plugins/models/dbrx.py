"""DBRX: LayerNorm without biases, queries, keys and values joined and cut, all experts of a product in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, Model, ModelSetup, RouterSpec
from frame.layers import Experts, RotaryEmbedding, Router, WeightSlot

from .decoder import Decoder, DecoderLayer, RotaryAttention, head_shape
from .mixture import SparseMLP
from .olmoe import CutAttention

#: The default of torch's LayerNorm: configurations do not name it.
_EPS = 1e-5
_ALL = slice(None)


class DbrxForCausalLM(Decoder):
    """LayerNorm, rotary positions, grouped-query attention, routed SwiGLU experts."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config = build.config
        Model.__init__(self, setup, options)
        rotary = RotaryEmbedding(_with_theta(build), head_shape(config)[2])
        self.embedding = build.embedding("transformer.wte", config.vocab_size, config.d_model)
        self.layers = build.layers(config.n_layers, lambda index: _layer(build, f"transformer.blocks.{index}", rotary))
        last = build.stage.last
        self.norm = PlainNorm(build, "transformer.norm_f") if last else Total(build, "transformer.norm_f")
        self.head = build.head("lm_head", config.d_model, config.vocab_size)


class PlainNorm(nn.Module):
    """LayerNorm with a weight alone, of x or, with a residual, of their sum."""

    def __init__(self, build: Build, prefix: str, device: torch.device | None = None) -> None:
        super().__init__()
        self.prefix, self.ops = prefix, build.ops
        empty = torch.empty(build.config.d_model, dtype=build.dtype, device=device or build.device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or with a residual (norm(x + residual), x + residual); all [T, d_model]."""
        total = x if residual is None else x + residual
        normed = self.ops.layer_norm(total, self.weight, None, _EPS)
        return normed if residual is None else (normed, total)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]


class Total(nn.Module):
    """Takes the place of the last norm in a pipeline stage that is not the last: adds, and knows the norm's tensor."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.absent = (PlainNorm(build, prefix, torch.device("meta")),)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(x + residual) twice, as a norm gives (normed, sum); all [T, d_model]."""
        total = x + residual
        return total, total


class FlatExperts(Experts):
    """Experts whose tensors w1, v1 and w2 are [E · intermediate, H] each: an expert's rows follow one another."""

    def weight_slots(self) -> list[WeightSlot]:
        names, size, width = (
            [f"{self.prefix}.{name}" for name in ("w1", "v1", "w2")],
            self.spec.intermediate_size,
            self.width,
        )
        shape = (self.spec.num_experts * size, self.spec.hidden_size)
        if not self.held:
            return [WeightSlot(name, (), None) for name in names]
        slots: list[WeightSlot] = []
        for local, expert in enumerate(self.held):
            start, here = expert * size + self.divided.rank * width, slice(local, local + 1)
            rows = (slice(start, start + width), _ALL)
            for name, half in zip(names[:2], (slice(0, width), slice(width, 2 * width)), strict=True):
                slots.append(WeightSlot(name, shape, self.gate_up, rows, (here, half)))
            slots.append(WeightSlot(names[2], shape, self.down, rows, (here,), transposed=True))
        return slots


def _value(part: Any, name: str, *default: Any) -> Any:
    """A setting of a part of the configuration, which is an object or, where a file of it was read, a dictionary."""
    if isinstance(part, Mapping):
        return part.get(name, *default) if default else part[name]
    return getattr(part, name, *default)


def _with_theta(build: Build) -> Build:
    """The build with the base of positions that DBRX's checkpoints keep among the settings of attention."""
    theta = _value(build.config.attn_config, "rope_theta", None)
    if theta is None:
        return build
    config = copy(build.config)
    config.rope_parameters = {**(config.rope_parameters or {}), "rope_theta": float(theta)}
    return replace(build, config=config)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config, name = build.config, f"{prefix}.norm_attn_norm"
    num_heads, num_kv_heads, head_dim = head_shape(config)
    bound = _value(config.attn_config, "clip_qkv", None)
    attention = (RotaryAttention if bound is None else CutAttention)(
        build.attention_input(f"{name}.attn", config.d_model, num_heads, num_kv_heads, head_dim, names=("Wqkv",)),
        rotary,
        build.attention(f"{name}.attn", num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.attn.out_proj", num_heads * head_dim, config.d_model, shard="row"),
    )
    if isinstance(attention, CutAttention):
        attention.bound = float(bound)
    norms = PlainNorm(build, f"{name}.norm_1"), PlainNorm(build, f"{name}.norm_2")
    return DecoderLayer(norms[0], attention, norms[1], _experts(build, f"{prefix}.ffn"))


def _experts(build: Build, prefix: str) -> SparseMLP:
    config = build.config
    ffn = config.ffn_config
    power, act = _value(ffn, "moe_normalize_expert_weights", 1.0), _value(ffn, "ffn_act_fn", None)
    if power not in (None, 1):
        raise ValueError(
            f"moe_normalize_expert_weights is {power}; weights of experts are divided by their sum (1) or not"
        )
    number, top_k, size = (_value(ffn, name) for name in ("moe_num_experts", "moe_top_k", "ffn_hidden_size"))
    spec = ExpertSpec(number, config.d_model, size, top_k, activation=(act or {"name": "silu"})["name"])
    router = RouterSpec(number, top_k, renormalize=power is not None)
    return SparseMLP(
        Router(build, f"{prefix}.router.layer", config.d_model, router),
        FlatExperts(build, f"{prefix}.experts.mlp", spec),
    )
