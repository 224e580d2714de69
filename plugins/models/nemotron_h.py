"""Nemotron-H: one mixer a layer, which is Mamba-2, attention without positions, or a feed-forward part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import Mamba2Mixer, Mamba2Spec, Router, normed_linear

from .hybrid import FeedForward, layer_kind, plain_attention
from .mamba2 import Backbone
from .positions import Unturned

_KINDS = ("linear_attention", "full_attention", "mlp", "moe")
#: The letters of `hybrid_override_pattern`.
_LETTERS = dict(zip("M*-E", _KINDS, strict=True))


class NemotronHForCausalLM(Backbone):
    """RMSNorm, and the mixer that the pattern of layers says."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.", "backbone."), *Backbone.renames)
    ignores: ClassVar[Sequence[str]] = (r"mtp\..*",)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        kinds = _layer_kinds(build.config)
        super().__init__(
            setup,
            options,
            eps=build.config.layer_norm_epsilon,
            make_mixer=lambda prefix, index: _mixer(build, prefix, kinds[index]),
        )


class SquaredMLP(nn.Module):
    """A norm, then down(relu(up x)²), without a gate."""

    def __init__(self, build: Build, prefix: str, intermediate_size: int) -> None:
        super().__init__()
        hidden_size, bias = build.config.hidden_size, build.config.mlp_bias
        self.up = build.linear(f"{prefix}.up_proj", hidden_size, intermediate_size, bias=bias, shard="column")
        self.down = build.linear(
            f"{prefix}.down_proj", intermediate_size, hidden_size, bias=bias, shard="row", reduce=False
        )

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        inner, _, residual = normed_linear(norm, self.up, hidden, residual)
        return self.down(functional.relu(inner).square()), residual

    def of(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] → a rank's part of the same, without a norm."""
        out: Tensor = self.down(functional.relu(self.up(hidden)).square())
        return out


class SharedSquaredMLP(SquaredMLP):
    """The expert that all tokens have, called without a norm."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return self.of(hidden)


class SquaredExperts(nn.Module):
    """A norm, a router with sigmoid scores and a correction, and experts of `SquaredMLP`'s kind beside a shared one."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        if config.moe_latent_size is not None:
            raise ValueError(f"moe_latent_size {config.moe_latent_size} of Nemotron-H is not supported yet")
        count, top_k = config.n_routed_experts, config.num_experts_per_tok
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
        shared = SharedSquaredMLP(build, f"{prefix}.shared_experts", config.moe_shared_expert_intermediate_size)
        spec = ExpertSpec(
            count,
            config.hidden_size,
            config.moe_intermediate_size,
            top_k,
            activation="relu2",
            gated=False,
            names=("up_proj", "down_proj"),
        )
        self.experts = build.experts(f"{prefix}.experts", spec, shared, reduce=False)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        logits, normed, residual = normed_linear(norm, self.router.linear, hidden, residual)
        return self.experts(normed, self.router.choose(logits)), residual


def _layer_kinds(config: Any) -> list[str]:
    given = getattr(config, "layers_block_type", None) or [_LETTERS.get(one, one) for one in _pattern(config)]
    return [layer_kind(one, *_KINDS) for one in given]


def _pattern(config: Any) -> str:
    return str(config.hybrid_override_pattern)


def _mixer(build: Build, prefix: str, kind: str) -> nn.Module:
    config = build.config
    if kind == "linear_attention":
        return Mamba2Mixer(build, prefix, _spec(config))
    if kind == "full_attention":
        if config.sliding_window:
            raise ValueError(f"sliding_window {config.sliding_window} of Nemotron-H is not supported: leave it out")
        return plain_attention(build, prefix, Unturned(), bias=config.attention_bias)
    if config.mlp_hidden_act != "relu2":
        raise ValueError(f"feed-forward parts of Nemotron-H are of 'relu2', not of {config.mlp_hidden_act!r}")
    if kind == "mlp":
        return FeedForward(SquaredMLP(build, prefix, config.intermediate_size))
    return FeedForward(SquaredExperts(build, prefix))


def _spec(config: Any) -> Mamba2Spec:
    if config.mamba_hidden_act != "silu":
        raise ValueError(f"Mamba-2's convolution is followed by 'silu', not by {config.mamba_hidden_act!r}")
    return Mamba2Spec(
        config.hidden_size,
        config.mamba_num_heads,
        config.mamba_head_dim,
        config.ssm_state_size,
        config.n_groups,
        config.conv_kernel,
        config.layer_norm_epsilon,
        (config.time_step_min, float("inf")),  # as transformers has it, whatever `time_step_limit` says
        bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )
