"""DeepSeek V2 and V3 and what is built like them: latent attention, then a dense or a routed feed-forward part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router, normed_linear

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation
from .latent import LatentAttentionBlock, ignored_layers, latent_rotary
from .mixture import SharedMLP

#: (build, prefix, index, rotary) → the attention part of a layer
MakeAttention = Callable[[Build, str, int, RotaryEmbedding], nn.Module]


class DeepseekDecoder(Decoder):
    """Llama's frame around latent attention; the layers behind `num_hidden_layers` in a checkpoint are not loaded."""

    def __init__(
        self,
        setup: ModelSetup,
        options: Any = None,
        *,
        router: RouterSpec | None,
        interleaved: bool,
        attention: MakeAttention | None = None,
    ) -> None:
        build = setup.build
        rotary, make = latent_rotary(build, interleaved=interleaved), attention or _attention
        super().__init__(
            setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, router, make, rotary)
        )
        self.ignores = (*type(self).ignores, ignored_layers(build.config))  # type: ignore[misc]


class DeepseekV2ForCausalLM(DeepseekDecoder):
    """Softmax scores, of the best groups of experts where `topk_method` says so; interleaved positions."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options, router=_softmax_router(setup.build.config), interleaved=True)


class DeepseekV3ForCausalLM(DeepseekDecoder):
    """Sigmoid scores, corrected for the choice of groups and experts; positions are interleaved as a rule."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        config = setup.build.config
        super().__init__(setup, options, router=sigmoid_router(config), interleaved=bool(config.rope_interleave))


class YoutuForCausalLM(DeepseekDecoder):
    """DeepSeek V3's attention, dense layers."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options, router=None, interleaved=bool(setup.build.config.rope_interleave))


class RoutedMLP(nn.Module):
    """A norm, a router, the experts that it chooses for each token, and the experts that all tokens share."""

    def __init__(self, build: Build, prefix: str, router: RouterSpec) -> None:
        super().__init__()
        config = build.config
        experts = ExpertSpec(
            router.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            router.top_k,
            activation=config.hidden_act,
        )
        shared = None
        if config.n_shared_experts:
            width = config.n_shared_experts * config.moe_intermediate_size
            shared = SharedMLP(build, f"{prefix}.shared_experts", width, gate_activation(build, config.hidden_act))
        self.router = Router(build, f"{prefix}.gate", config.hidden_size, router)
        self.experts = build.experts(f"{prefix}.experts", experts, shared, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def sigmoid_router(config: Any) -> RouterSpec:
    """The router of DeepSeek V3 and its like."""
    return RouterSpec(
        config.n_routed_experts,
        config.num_experts_per_tok,
        score="sigmoid",
        renormalize=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        corrected=True,
        num_groups=config.n_group or 1,
        top_groups=config.topk_group or 1,
        group_score="top2",
    )


def _softmax_router(config: Any) -> RouterSpec:
    groups = {"greedy": False, "group_limited_greedy": True}
    if config.topk_method not in groups:
        raise ValueError(f"no topk_method {config.topk_method!r} of a router; there are: {', '.join(groups)}")
    if config.norm_topk_prob:
        raise ValueError("norm_topk_prob of DeepSeek V2 is not supported: its weights are not divided by their sum")
    grouped = groups[config.topk_method]
    return RouterSpec(
        config.n_routed_experts,
        config.num_experts_per_tok,
        renormalize=False,
        scale=config.routed_scaling_factor,
        num_groups=config.n_group if grouped else 1,
        top_groups=config.topk_group if grouped else 1,
    )


def _attention(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    del index
    return LatentAttentionBlock(build, prefix, rotary, bias=bool(build.config.attention_bias))


def _is_sparse(config: Any, index: int) -> bool:
    """Whether layer `index` has routed experts: by `mlp_layer_types` where given, else behind the first dense ones."""
    kinds = getattr(config, "mlp_layer_types", None)
    return bool(kinds[index] == "sparse" if kinds else index >= config.first_k_dense_replace)


def _layer(
    build: Build,
    prefix: str,
    index: int,
    router: RouterSpec | None,
    attention: MakeAttention,
    rotary: RotaryEmbedding,
) -> nn.Module:
    config = build.config
    hidden_size, eps = config.hidden_size, config.rms_norm_eps
    if router is not None and _is_sparse(config, index):
        mlp: nn.Module = RoutedMLP(build, f"{prefix}.mlp", router)
    else:
        activation, bias = gate_activation(build, config.hidden_act), bool(getattr(config, "mlp_bias", False))
        mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, bias=bias)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        attention(build, f"{prefix}.self_attn", index, rotary),
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        mlp,
    )
