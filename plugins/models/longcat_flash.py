"""LongCat-Flash: layers of two attentions and two dense parts, with experts beside them whose result is added last.

Some experts give back what they are given; they have no weights and cost nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelSetup, RouterSpec, Routing
from frame.layers import RotaryEmbedding, Router

from .decoder import Decoder, GatedMLP, gate_activation
from .latent import LatentAttentionBlock, latent_rotary
from .mixture import SharedMLP


class LongcatFlashForCausalLM(Decoder):
    """Latents are scaled by the square root of how much narrower than the hidden states they are."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config, rotary = build.config, latent_rotary(build, interleaved=True)
        if getattr(config, "router_bias", False):
            raise ValueError("router_bias of LongCat-Flash is not supported")
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: LongcatLayer(build, prefix, rotary),
            num_layers=config.num_layers,
        )
        known = "|".join(map(str, range(config.n_routed_experts)))
        # files of transformers have products of the experts without weights
        unused = rf"model\.layers\.\d+\.mlp\.experts\.(?!({known})\.)\d+\..*"
        self.ignores = (*type(self).ignores, r"model\.mtp\..*", unused)  # type: ignore[misc]


class LongcatLayer(nn.Module):
    """attention, dense part, attention, dense part; what experts make of the first dense part's input comes last."""

    def __init__(self, build: Build, prefix: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config = build.config
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        scales = (hidden_size / config.q_lora_rank) ** 0.5, (hidden_size / config.kv_lora_rank) ** 0.5
        before, after, attentions = list[nn.Module](), list[nn.Module](), list[nn.Module]()
        for index in range(2):
            before.append(build.norm(f"{prefix}.input_layernorm.{index}", hidden_size, eps=eps, partial=True))
            after.append(build.norm(f"{prefix}.post_attention_layernorm.{index}", hidden_size, eps=eps, partial=True))
            name, bias = f"{prefix}.self_attn.{index}", bool(config.attention_bias)
            attentions.append(LatentAttentionBlock(build, name, rotary, bias=bias, scales=scales))
        self.before, self.after, self.attentions = map(nn.ModuleList, (before, after, attentions))
        activation, size = gate_activation(build, config.hidden_act), config.ffn_hidden_size
        self.first = SharedMLP(build, f"{prefix}.mlps.0", size, activation)
        self.second = GatedMLP(build, f"{prefix}.mlps.1", size, activation)
        self.experts = ShortcutExperts(build, f"{prefix}.mlp")

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """As `DecoderLayer.forward`."""
        hidden, residual = self.attentions[0](self.before[0], hidden, residual, positions, step)
        normed, residual = self.after[0](hidden, residual)
        beside, hidden = self.experts(normed), self.first(normed)
        hidden, residual = self.attentions[1](self.before[1], hidden, residual, positions, step)
        hidden, residual = self.second(self.after[1], hidden, residual)
        return hidden + beside, residual


class ShortcutExperts(nn.Module):
    """Routed experts, the last `zero_expert_num` of which return their input; a rank's part of a sum."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        self.num_real = config.n_routed_experts
        router = RouterSpec(
            self.num_real + (config.zero_expert_num or 0),
            config.moe_topk,
            renormalize=False,
            scale=config.routed_scaling_factor,
            corrected=True,
        )
        spec = ExpertSpec(
            self.num_real,
            config.hidden_size,
            config.expert_ffn_hidden_size,
            config.moe_topk,
            activation=config.hidden_act,
        )
        name = f"{prefix}.router"
        bias = f"{name}.e_score_correction_bias"
        self.router = Router(build, f"{name}.classifier", config.hidden_size, router, correction=bias)
        self.experts = build.experts(f"{prefix}.experts", spec, reduce=False)
        self.adds_input = build.groups.tensor.rank == 0  # once in the sum

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        weights, ids = self.router(hidden)
        real = ids < self.num_real
        out: Tensor = self.experts(hidden, Routing(weights.where(real, 0), ids.where(real, -1)))
        if not self.adds_input:
            return out
        kept: Tensor = weights.where(~real, 0).sum(-1, keepdim=True)
        return out + hidden * kept.to(hidden.dtype)
