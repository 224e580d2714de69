"""Kimi-Linear: delta attention in most layers, latent attention without positions in the others, routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelSetup, RouterSpec
from frame.layers import DeltaHeads, DeltaNetSpec, KimiDeltaAttention, Router, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation
from .hybrid import layer_kind
from .mixture import SharedMLP


class KimiLinearForCausalLM(Decoder):
    """RMSNorm, delta or latent attention, SwiGLU or experts beside a shared one."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.forget_gate\.", "."),
        (r"\.block_sparse_moe\.", ".mlp."),
        *Decoder.renames,
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index))


class ExpandedAttention(nn.Module):
    """Latent attention whose keys and values are expanded before they are cached, values padded to the keys' width.

    Queries and keys have a part that is the same for all heads of a key, and no positions.
    """

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        hidden_size, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is not None:
            raise ValueError(f"q_lora_rank {config.q_lora_rank} of Kimi-Linear is not supported, which has null")
        self.nope, self.shared, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.width, self.rank = self.nope + self.shared, config.kv_lora_rank
        if self.value > self.width:
            raise ValueError(f"v_head_dim {self.value} is above the {self.width} of a key, which is not supported")
        self.query = build.linear(f"{prefix}.q_proj", hidden_size, heads * self.width, shard="column")
        self.latent = build.linear(f"{prefix}.kv_a_proj_with_mqa", hidden_size, self.rank + self.shared, bias=bias)
        self.latent_norm = build.norm(f"{prefix}.kv_a_layernorm", self.rank, eps=1e-6)  # not the configuration's
        self.expand = build.linear(f"{prefix}.kv_b_proj", self.rank, heads * (self.nope + self.value), shard="column")
        self.attention = build.attention(prefix, heads, heads, self.width, scale=self.width**-0.5)
        self.output = build.linear(
            f"{prefix}.o_proj", heads * self.value, hidden_size, bias=bias, shard="row", reduce=False
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        query, normed, residual = normed_linear(norm, self.query, hidden, residual)
        latent, shared = self.latent(normed).split((self.rank, self.shared), dim=-1)
        expanded = self.expand(self.latent_norm(latent.contiguous())).unflatten(-1, (-1, self.nope + self.value))
        key, value = expanded.split((self.nope, self.value), dim=-1)
        key = torch.cat((key, shared[:, None].expand(-1, key.shape[1], -1)), -1)
        value = functional.pad(value, (0, self.width - self.value))
        out = self.attention(query.unflatten(-1, (-1, self.width)), key, value, step)
        return self.output(out.unflatten(-1, (-1, self.width))[..., : self.value].flatten(1)), residual


class SharedExpertMLP(nn.Module):
    """A norm, a router with sigmoid scores and a correction, and its experts beside one that all tokens have."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        count, top_k, size = config.num_local_experts, config.num_experts_per_tok, config.moe_intermediate_size
        router = RouterSpec(
            count,
            top_k,
            "sigmoid",
            renormalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            corrected=True,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            group_score="top2",
        )
        self.router = Router(build, f"{prefix}.gate", config.hidden_size, router)
        shared = SharedMLP(
            build,
            f"{prefix}.shared_experts",
            size * config.n_shared_experts,
            gate_activation(build, config.hidden_act),
        )
        spec = ExpertSpec(count, config.hidden_size, size, top_k, names=("w1", "w3", "w2"))
        self.experts = build.experts(f"{prefix}.experts", spec, shared, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _layer(build: Build, prefix: str, index: int) -> nn.Module:
    config = build.config
    hidden_size, eps, name = config.hidden_size, config.rms_norm_eps, f"{prefix}.self_attn"
    if config.hidden_act != "silu":
        raise ValueError(f"Kimi-Linear's convolutions and experts are of 'silu', not of {config.hidden_act!r}")
    part: nn.Module
    if layer_kind(config.layer_types[index], "linear_attention", "full_attention") == "full_attention":
        part = ExpandedAttention(build, name)
    else:
        heads, size = config.linear_num_heads, config.linear_head_dim
        spec = DeltaNetSpec(hidden_size, heads, heads, size, size, config.linear_conv_kernel_dim, eps)
        part = KimiDeltaAttention(build, name, DeltaHeads.of(build, name, spec))
    if config.mlp_layer_types[index] == "sparse":
        mlp: nn.Module = SharedExpertMLP(build, f"{prefix}.mlp")
    else:
        activation = gate_activation(build, config.hidden_act)
        mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        part,
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        mlp,
    )
