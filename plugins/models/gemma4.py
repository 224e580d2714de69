"""Gemma 4, the text part: layers of two widths of head, keys that later layers share, an embedding for each layer.

Experts, and attention that also looks ahead, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, ModelInputs, ModelSetup
from frame.layers import RotaryEmbedding, WeightSlot, normed_linear

from .activations import plain_activation
from .decoder import GatedMLP, gate_activation, sliding_window
from .gemma2 import GemmaDecoder
from .norms import NormSpec, UnweightedNorm

#: The keys and values of a step's tokens, each [T, Hk, D], and the attention that keeps them.
Kept = tuple[Tensor, Tensor, nn.Module]


class Gemma4ForCausalLM(GemmaDecoder):
    """RMSNorm around each part, normed heads and values, windows in turn, GeGLU; the last layers may have no keys."""

    # layers read what others keep, and the ids of tokens, which other pipeline stages do not have
    stage_tensors: ClassVar[Sequence[str]] = ()

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, _complete(setup.build.config)
        for name, accepted in (("enable_moe_block", (False, None)), ("use_bidirectional_attention", (None, "vision"))):
            if (value := getattr(config, name)) not in accepted:
                raise ValueError(f"Gemma 4 with {name}={value!r} is not supported; there are: {accepted}")
        parts = _Parts(build)
        super().__init__(setup, options, make_layer=parts.layer, partial=False)
        self.per_layer = PerLayerEmbedding(build) if config.hidden_size_per_layer_input else None

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, extra = inputs.embedded(self.embed), None
        if self.per_layer is not None:
            if inputs.ids is None:
                raise ValueError("Gemma 4 with embeddings for each layer needs the ids of tokens, not embeddings")
            extra = self.per_layer(inputs.ids, hidden)
        kept: dict[str, Kept] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, None if extra is None else extra[:, index], inputs.positions, step, kept)
        out: Tensor = self.norm(hidden)
        return out


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text part of a checkpoint that sees and hears; the weights of the other parts are not loaded."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.language_model\.", "model."),)
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
        mode, kind = config.kv_sharing_modes[index], config.layer_types[index]
        head_dim = config.per_layer_config[index].head_dim
        name, rotary = f"{prefix}.self_attn", self._rotaries[kind]
        wide = config.use_double_wide_mlp and mode == "reuse"
        mlp = GatedMLP(
            build,
            f"{prefix}.mlp",
            config.intermediate_size * (2 if wide else 1),
            gate_activation(build, config.hidden_activation),
            reduce=True,
        )
        attention: nn.Module
        if mode == "reuse":
            attention = SharingAttention(build, name, head_dim, rotary, kind)
        else:
            attention = KeepingAttention(build, name, index, rotary, kind)
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
        hidden = residual + self.after_mlp(out)
        if extra is not None:
            gated = self.activation(self.gate(hidden)) * extra
            hidden = hidden + self.after_projection(self.projection(gated))
        scaled: Tensor = hidden * self.scalar
        return scaled

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.layer_scalar", (1,), self.scalar)]


class KeepingAttention(nn.Module):
    """Attention with keys and values of its own, which it lends to later layers of its `kind`."""

    def __init__(self, build: Build, name: str, index: int, rotary: RotaryEmbedding, kind: str) -> None:
        super().__init__()
        config = _complete(build.config)
        own, heads, bias = config.per_layer_config[index], config.num_attention_heads, config.attention_bias
        kv_heads, dim = own.num_key_value_heads, own.head_dim
        equal = config.attention_k_eq_v and kind == "full_attention"
        names = ("q_proj", "k_proj", "k_proj" if equal else "v_proj")
        self.inputs = build.attention_input(name, config.hidden_size, heads, kv_heads, dim, bias=bias, names=names)
        window = sliding_window(config, index)
        self.attention = build.attention(name, heads, kv_heads, dim, scale=1.0, window=window)
        self.output = build.linear(f"{name}.o_proj", heads * dim, config.hidden_size, bias=bias, shard="row")
        self.query_norm, self.key_norm = (
            build.norm(f"{name}.{part}", dim, eps=config.rms_norm_eps) for part in ("q_norm", "k_norm")
        )
        self.value_norm = UnweightedNorm(build, dim, NormSpec(config.rms_norm_eps, weighted=False))
        self.rotary, self.kind = rotary, kind

    def forward(
        self, norm: nn.Module, hidden: Tensor, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> tuple[Tensor, Tensor]:
        """(attention of norm(hidden), hidden); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, None)
        query, key = self.rotary(positions, query, key, (self.query_norm, self.key_norm))
        value = self.value_norm(value)
        kept[self.kind] = key, value, self.attention
        return self.output(self.attention(query, key, value, step)), residual


class SharingAttention(nn.Module):
    """Attention with queries of its own, to the keys and values of the last layer of its kind that has some.

    These are written to that layer's cache once more, which changes nothing there.
    """

    def __init__(self, build: Build, name: str, head_dim: int, rotary: RotaryEmbedding, kind: str) -> None:
        super().__init__()
        config, size = build.config, build.config.num_attention_heads * head_dim
        bias = config.attention_bias
        self.query = build.linear(f"{name}.q_proj", config.hidden_size, size, bias=bias, shard="column")
        self.output = build.linear(f"{name}.o_proj", size, config.hidden_size, bias=bias, shard="row")
        self.query_norm = build.norm(f"{name}.q_norm", head_dim, eps=config.rms_norm_eps)
        self.rotary, self.kind, self.name, self.head_dim = rotary, kind, name, head_dim

    def forward(
        self, norm: nn.Module, hidden: Tensor, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> tuple[Tensor, Tensor]:
        """(attention of norm(hidden), hidden); all [T, hidden_size]."""
        joined, _, residual = normed_linear(norm, self.query, hidden, None)
        query = joined.unflatten(1, (-1, self.head_dim))
        query, _ = self.rotary(positions, query, query[:, :1], (self.query_norm, self.query_norm))
        key, value, attention = kept[self.kind]
        return self.output(attention(query, key, value, step)), residual

    def weight_slots(self) -> list[WeightSlot]:
        """Some files hold keys and values of these layers, which nothing reads."""
        names = [f"{part}_proj.{suffix}" for part in "kv" for suffix in ("weight", "bias")]
        return [WeightSlot(f"{self.name}.{name}", (), None) for name in (*names, "k_norm.weight", "v_norm.weight")]


class PerLayerEmbedding(nn.Module):
    """What is added in each layer: from a table by token and from the embedding of the model, joined."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.num_layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        size, self.scale = self.num_layers * self.width, config.hidden_size**-0.5
        words = config.vocab_size_per_layer_input
        self.table = build.embedding("model.embed_tokens_per_layer", words, size)
        self.projection = build.linear("model.per_layer_model_projection", config.hidden_size, size)
        self.norm = build.norm("model.per_layer_projection_norm", self.width, eps=config.rms_norm_eps)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids [T], embeddings [T, hidden_size] → [T, num_layers, width]."""
        shape = (-1, self.num_layers, self.width)
        rows = self.table(ids).view(shape)
        rows = rows * torch.tensor(self.width**0.5, dtype=rows.dtype).item()
        projected: Tensor = self.norm((self.projection(hidden) * self.scale).view(shape))
        out: Tensor = (projected + rows) * math.sqrt(0.5)
        return out
