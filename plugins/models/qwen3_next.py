"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, gated attention in others, experts beside a shared one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelSetup, RouterSpec
from frame.layers import (
    DeltaHeads,
    DeltaNetSpec,
    GatedDeltaNet,
    RotaryEmbedding,
    Router,
    gated_attention_input,
    normed_linear,
)

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation, head_shape
from .mixture import SharedMLP

MakeMixer = Callable[[Build, str], nn.Module]


class Qwen3NextForCausalLM(Decoder):
    """Norms with weight + 1, delta nets and gated attention with a partial rope."""

    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r"mtp\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2], mixed_axes=True)

        def layer(prefix: str, index: int) -> nn.Module:
            return _layer(build, prefix, index, rotary, self.mixer)

        super().__init__(setup, options, make_layer=layer, norm_offset=1.0)

    @staticmethod
    def mixer(build: Build, prefix: str) -> nn.Module:
        """The delta net called `prefix`; its two tensors are in the order of key heads."""
        spec = _delta_spec(build.config)
        heads = DeltaHeads.of(build, prefix, spec)
        runs = heads.by_key_head(f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba")
        return GatedDeltaNet(build, prefix, heads, runs, _conv_runs(prefix, heads))


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """As Qwen3-Next, with four tensors for the inputs of a delta net; the text part of a model with pictures too."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.", ""),
        *Decoder.renames,
    )
    ignores: ClassVar[Sequence[str]] = (*Qwen3NextForCausalLM.ignores, r"(model\.)?visual\..*")

    @staticmethod
    def mixer(build: Build, prefix: str) -> nn.Module:
        spec = _delta_spec(build.config)
        heads = DeltaHeads.of(build, prefix, spec)
        names = [f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        return GatedDeltaNet(build, prefix, heads, heads.by_kind(names), _conv_runs(prefix, heads))


class GatedAttention(nn.Module):
    """A norm, projections, norms of each query and key head, rotary positions, attention, its output times a gate."""

    def __init__(self, build: Build, prefix: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config, self.rotary = build.config, rotary
        heads = head_shape(config)
        num_heads, self.head_dim = heads[0], heads[2]
        bias, hidden_size, eps = config.attention_bias, config.hidden_size, config.rms_norm_eps
        self.inputs, self.sizes = gated_attention_input(build, prefix, hidden_size, heads, bias=bias)
        self.query_norm = build.norm(f"{prefix}.q_norm", self.head_dim, eps=eps, offset=1.0)
        self.key_norm = build.norm(f"{prefix}.k_norm", self.head_dim, eps=eps, offset=1.0)
        self.attention = build.attention(prefix, *heads, scale=self.head_dim**-0.5)
        self.output = build.linear(
            f"{prefix}.o_proj", num_heads * self.head_dim, hidden_size, bias=bias, shard="row", reduce=False
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        joined, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        *parts, gate = joined.split(self.sizes, dim=-1)
        query, key, value = (one.unflatten(-1, (-1, self.head_dim)) for one in parts)
        query, key = self.rotary(positions, query, key, (self.query_norm, self.key_norm))
        return self.output(self.attention(query, key, value, step) * gate.sigmoid()), residual


class SharedSparseMLP(nn.Module):
    """A norm, a router, the experts that it prefers for each token, and one expert for all tokens."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        count, top_k, size = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
        shared = SharedMLP(
            build,
            f"{prefix}.shared_expert",
            config.shared_expert_intermediate_size,
            gate_activation(build, config.hidden_act),
            scale=f"{prefix}.shared_expert_gate",
        )
        renormalize = getattr(config, "norm_topk_prob", True)
        self.router = Router(
            build, f"{prefix}.gate", config.hidden_size, RouterSpec(count, top_k, renormalize=renormalize)
        )
        spec = ExpertSpec(count, config.hidden_size, size, top_k, activation=config.hidden_act)
        self.experts = build.experts(f"{prefix}.experts", spec, shared, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _delta_spec(config: Any) -> DeltaNetSpec:
    if config.hidden_act != "silu":
        raise ValueError(f"the convolution of a delta net is followed by 'silu', not by {config.hidden_act!r}")
    return DeltaNetSpec(
        config.hidden_size,
        config.linear_num_value_heads,
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        config.rms_norm_eps,
    )


def _conv_runs(prefix: str, heads: DeltaHeads) -> list[tuple[str, int, int, int]]:
    return heads.by_kind([f"{prefix}.conv1d", "", ""])[:3]


def _is_sparse(config: Any, index: int) -> bool:
    if getattr(config, "num_experts", 0) == 0 or index in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return bool((index + 1) % getattr(config, "decoder_sparse_step", 1) == 0)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding, mixer: MakeMixer) -> nn.Module:
    config = build.config
    hidden_size, eps, kind = config.hidden_size, config.rms_norm_eps, config.layer_types[index]
    if kind == "linear_attention":
        part = mixer(build, f"{prefix}.linear_attn")
    elif kind == "full_attention":
        part = GatedAttention(build, f"{prefix}.self_attn", rotary)
    else:
        raise ValueError(f"no layer type {kind!r}; there are: full_attention, linear_attention")
    if _is_sparse(config, index):
        mlp: nn.Module = SharedSparseMLP(build, f"{prefix}.mlp")
    else:
        mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, gate_activation(build, config.hidden_act))
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, offset=1.0, partial=True),
        part,
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, offset=1.0, partial=True),
        mlp,
    )
