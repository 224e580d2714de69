"""The GPTs with learned positions: the first one, GPT-2, GPT-Neo, and GPTBigCode (StarCoder)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup

from .added_positions import LearnedPositions
from .classic import (
    ClassicAttention,
    ClassicDecoder,
    Outline,
    PostNormLayer,
    SequentialLayer,
    plain_heads,
)
from .plain_mlp import PlainMLP


@dataclass(frozen=True)
class Traits:
    """What differs between layers. `groups` 0: one tensor each of queries, keys and values.

    `transposed`: weights are stored as [in, out]. `post_norm`: norms stand behind the parts.
    """

    function: str
    inner: int
    scale: float
    output: str = "c_proj"
    num_kv_heads: int = 0
    groups: int = 1
    window: int = 0
    transposed: bool = False
    post_norm: bool = False


class GPT2LMHeadModel(ClassicDecoder):
    """LayerNorm before each part, biases everywhere, weights stored as [in, out], head tied to the embedding."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)
    outline: ClassVar[Outline] = Outline("wte", "h", "ln_f")
    positions: ClassVar[str] = "wpe"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        if getattr(config, "add_cross_attention", False):
            raise ValueError(f"{config.model_type} with cross-attention (add_cross_attention=true) is not supported")
        super().__init__(
            setup,
            options,
            outline=replace(self.outline, eps=config.layer_norm_epsilon),
            make_layer=lambda prefix, index: _layer(build, prefix, self.traits(config, index)),
            places=LearnedPositions(build, self.positions, config.max_position_embeddings),
        )

    def traits(self, config: Any, index: int) -> Traits:
        """Those of layer `index`."""
        scale = _scale(config)
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        return Traits(config.activation_function, config.n_inner or 4 * config.hidden_size, scale, transposed=True)


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """One key/value head, or as many as queries; then all three are joined head by head."""

    def traits(self, config: Any, index: int) -> Traits:
        """Those of every layer."""
        del index
        shared = 1 if config.multi_query else config.num_attention_heads
        inner = config.n_inner or 4 * config.hidden_size
        return Traits(config.activation_function, inner, _scale(config), num_kv_heads=shared, groups=shared)


class GPTNeoForCausalLM(GPT2LMHeadModel):
    """Windows in some layers; scores are not scaled; queries, keys and values without biases."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""), (r"\.attn\.attention\.", ".attn."))
    ignores: ClassVar[Sequence[str]] = (*ClassicDecoder.ignores, r".*\.attn\.attention\.(bias|masked_bias)")

    def traits(self, config: Any, index: int) -> Traits:
        """Those of layer `index`."""
        kind, inner = config.attention_layers[index], config.intermediate_size or 4 * config.hidden_size
        if kind not in ("global", "local"):
            raise ValueError(f"no attention {kind!r} of layer {index}; there are: global, local")
        window = config.window_size if kind == "local" else 0
        return Traits(config.activation_function, inner, 1.0, "out_proj", groups=0, window=window)


class OpenAIGPTLMHeadModel(GPT2LMHeadModel):
    """The first GPT: norms behind each part, and none at the end."""

    ignores: ClassVar[Sequence[str]] = (*ClassicDecoder.ignores, r"(transformer\.)?position_ids")
    outline: ClassVar[Outline] = Outline("tokens_embed", "h", "")
    positions: ClassVar[str] = "positions_embed"

    def traits(self, config: Any, index: int) -> Traits:
        """Those of every layer; "gelu" is the one by tanh here."""
        del index
        function = "gelu_new" if config.afn == "gelu" else config.afn
        scale = plain_heads(config)[1] ** -0.5
        return Traits(function, 4 * config.hidden_size, scale, transposed=True, post_norm=True)


def _scale(config: Any) -> float:
    return float(plain_heads(config)[1] ** -0.5) if config.scale_attn_weights else 1.0


def _layer(build: Build, prefix: str, traits: Traits) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.attn", f"{prefix}.mlp"
    size, eps, apart = config.hidden_size, config.layer_norm_epsilon, traits.groups == 0
    heads, head_dim = plain_heads(config)
    kv_heads, transposed = traits.num_kv_heads or heads, traits.transposed
    inputs = (
        build.attention_input(name, size, heads, kv_heads, head_dim)
        if apart
        else build.attention_input(
            name, size, heads, kv_heads, head_dim,
            bias=True, names=("c_attn",), transposed=transposed, groups=traits.groups,
        )
    )  # fmt: skip
    attention = ClassicAttention(
        inputs,
        build.attention(name, heads, kv_heads, head_dim, scale=traits.scale, window=traits.window),
        build.linear(f"{name}.{traits.output}", size, size, bias=True, shard="row", transposed=transposed),
    )
    norms = (
        build.norm(f"{prefix}.ln_1", size, eps=eps, kind="layer"),
        build.norm(f"{prefix}.ln_2", size, eps=eps, kind="layer"),
    )
    part = PlainMLP(build, (f"{mlp}.c_fc", f"{mlp}.c_proj"), traits.inner, traits.function, transposed=transposed)
    return (PostNormLayer if traits.post_norm else SequentialLayer)(norms, attention, part)
