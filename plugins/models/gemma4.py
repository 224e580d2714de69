"""Gemma 4, the text part: layers of two widths of head, keys that later layers share, an embedding for each layer.

Some have routed experts beside the feed-forward part of each layer. Attention that also looks ahead is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelInputs, ModelSetup, RouterSpec, Routing
from frame.layers import RotaryEmbedding, Router, WeightSlot

from .activations import plain_activation
from .decoder import GatedMLP, gate_activation
from .gemma2 import GemmaDecoder
from .gemma3 import Gemma3ForConditionalGeneration
from .norms import NormSpec, UnweightedNorm
from .shared_keys import KeepingAttention, Kept, PerLayerEmbedding, SharingAttention, shares_keys


class Gemma4ForCausalLM(GemmaDecoder):
    """RMSNorm around each part, normed heads and values, windows in turn, GeGLU; the last layers may have no keys."""

    # layers read what others keep, and the ids of tokens, which other pipeline stages do not have
    stage_tensors: ClassVar[Sequence[str]] = ()

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, _complete(setup.build.config)
        ahead, accepted = config.use_bidirectional_attention, (None, "vision")
        if ahead not in accepted:
            raise ValueError(f"Gemma 4 with use_bidirectional_attention={ahead!r} is not supported; use: {accepted}")
        parts = _Parts(build)
        super().__init__(setup, options, make_layer=parts.layer, partial=False)
        self.per_layer = PerLayerEmbedding(build) if config.hidden_size_per_layer_input else None
        self.needs_ids = self.per_layer is not None

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, extra = inputs.embedded(self.embed), None
        if self.per_layer is not None:
            if inputs.ids is None or inputs.embeds is not None:
                raise ValueError("Gemma 4 with embeddings for each layer needs the ids of tokens, not embeddings")
            extra = self.per_layer(inputs.ids, hidden)
        kept: dict[str, Kept] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, None if extra is None else extra[:, index], inputs.positions, step, kept)
        out: Tensor = self.norm(hidden)
        return out


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text part of a checkpoint that sees and hears; the weights of the other parts are not loaded."""

    renames: ClassVar[Sequence[tuple[str, str]]] = Gemma3ForConditionalGeneration.renames
    ignores: ClassVar[Sequence[str]] = (
        *Gemma4ForCausalLM.ignores,
        r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
    )


def _complete(config: Any) -> Any:
    """The object of transformers, which knows what each layer has."""
    return getattr(config, "complete", config)


class _Parts:
    """Makes the layers, which share tables of positions."""

    def __init__(self, build: Build) -> None:
        self._build, self._config = build, _complete(build.config)
        own = self._config.per_layer_config
        dims = {kind: own[index].head_dim for index, kind in enumerate(self._config.layer_types)}
        self._rotaries = {kind: RotaryEmbedding(build, dim, layer_type=kind) for kind, dim in dims.items()}

    def layer(self, prefix: str, index: int) -> nn.Module:
        build, config = self._build, self._config
        shares, kind = shares_keys(config, index), config.layer_types[index]
        head_dim = config.per_layer_config[index].head_dim
        name, rotary = f"{prefix}.self_attn", self._rotaries[kind]
        wide = config.use_double_wide_mlp and shares
        mlp = GatedMLP(
            build,
            f"{prefix}.mlp",
            config.intermediate_size * (2 if wide else 1),
            gate_activation(build, config.hidden_activation),
            reduce=True,
        )
        attention: nn.Module
        if shares:
            attention = SharingAttention(build, name, head_dim, rotary, kind)
        else:
            own = config.per_layer_config[index]
            equal = bool(config.attention_k_eq_v) and kind == "full_attention"
            heads = (own.num_key_value_heads, own.head_dim)
            attention = KeepingAttention(build, name, index, rotary, heads=heads, equal=equal)
        return Gemma4Layer(build, prefix, attention, mlp)


class Gemma4Layer(nn.Module):
    """A sandwich of norms around each part, what the layer's own embedding adds, and a factor for all."""

    def __init__(self, build: Build, prefix: str, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        config, self.prefix = build.config, prefix
        hidden_size, width = config.hidden_size, config.hidden_size_per_layer_input

        def norm(name: str) -> nn.Module:
            return build.norm(f"{prefix}.{name}", hidden_size, eps=config.rms_norm_eps)

        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.attention, self.mlp = attention, mlp
        self.experts = Gemma4Experts(build, prefix) if config.enable_moe_block else None
        if width:
            self.gate = build.linear(f"{prefix}.per_layer_input_gate", hidden_size, width)
            self.projection = build.linear(f"{prefix}.per_layer_projection", width, hidden_size)
            self.after_projection = norm("post_per_layer_input_norm")
            self.activation = plain_activation(build, config.hidden_activation)
        empty = torch.empty(1, dtype=build.dtype, device=build.device)
        self.scalar = nn.Parameter(empty, requires_grad=False)

    def forward(
        self, hidden: Tensor, extra: Tensor | None, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> Tensor:
        """hidden [T, hidden_size], `extra` [T, hidden_size_per_layer_input] → [T, hidden_size]."""
        out, residual = self.attention(self.before_attention, hidden, positions, step, kept)
        out, residual = self.mlp(self.before_mlp, self.after_attention(out), residual)
        if self.experts is not None:
            out = self.experts(out, residual)
        hidden = residual + self.after_mlp(out)
        if extra is not None:
            gated = self.activation(self.gate(hidden)) * extra
            hidden = hidden + self.after_projection(self.projection(gated))
        scaled: Tensor = hidden * self.scalar
        return scaled

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.layer_scalar", (1,), self.scalar)]


class Gemma4Experts(nn.Module):
    """Routed experts of what the dense part of a layer is given too; both results are normed and added."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        number, top_k, size = config.num_experts, config.top_k_experts, config.moe_intermediate_size
        if not (number and top_k and size):
            raise ValueError("Gemma 4 with experts needs num_experts, top_k_experts and moe_intermediate_size")
        spec = ExpertSpec(number, config.hidden_size, size, top_k, activation=config.hidden_activation)
        self.router = Gemma4Router(build, f"{prefix}.router", RouterSpec(number, top_k))
        self.experts = build.experts(f"{prefix}.experts", spec)
        self.after_dense, self.before, self.after = (
            build.norm(f"{prefix}.{part}", config.hidden_size, eps=config.rms_norm_eps)
            for part in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
        )

    def forward(self, dense: Tensor, hidden: Tensor) -> Tensor:
        """What the dense part gives and what it is given before its norm → the sum of both parts; [T, hidden_size]."""
        routed: Tensor = self.after(self.experts(self.before(hidden), self.router(hidden)))
        out: Tensor = self.after_dense(dense) + routed
        return out


class Gemma4Router(nn.Module):
    """A router with an unweighted norm and learned scales: of its inputs, and of each expert's weight."""

    def __init__(self, build: Build, prefix: str, spec: RouterSpec) -> None:
        super().__init__()
        size, self.prefix = build.config.hidden_size, prefix
        self.norm = UnweightedNorm(build, size, NormSpec(build.config.rms_norm_eps, weighted=False))
        self.choice, self.shrink = Router(build, f"{prefix}.proj", size, spec), size**-0.5
        self.scale, self.expert_scale = (
            nn.Parameter(torch.empty(count, dtype=build.dtype, device=build.device), requires_grad=False)
            for count in (size, spec.num_experts)
        )

    def forward(self, hidden: Tensor) -> Routing:
        """hidden [T, hidden_size] → the experts of each token."""
        weights, ids = self.choice(self.norm(hidden) * self.scale * self.shrink)
        return Routing(weights * self.expert_scale[ids], ids)

    def weight_slots(self) -> list[WeightSlot]:
        named = (("scale", self.scale), ("per_expert_scale", self.expert_scale))
        return [WeightSlot(f"{self.prefix}.{name}", tuple(tensor.shape), tensor) for name, tensor in named]
