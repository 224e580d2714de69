"""BLOOM and MPT: ALiBi in place of positions, LayerNorm, a plain MLP four times as wide as the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup

from .added_positions import alibi_slopes
from .classic import ClassicAttention, ClassicDecoder, EmbeddingNorm, Outline, SequentialLayer, plain_heads
from .plain_mlp import PlainMLP

#: What MPT's settings of attention must be.
_MPT_ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "qk_ln": False,
    "prefix_lm": False,
    "attn_uses_sequence_id": False,
}
_MPT: Mapping[str, Any] = {"no_bias": True, "logit_scale": None}


class BloomForCausalLM(ClassicDecoder):
    """A norm of the embeddings; queries, keys and values joined head by head; tanh-gelu; biases."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        super().__init__(
            setup,
            options,
            outline=Outline("word_embeddings", "h", "ln_f", eps=config.layer_norm_epsilon),
            make_layer=lambda prefix, _: _bloom_layer(build, prefix),
            places=EmbeddingNorm(build, "word_embeddings_layernorm", config.layer_norm_epsilon),
        )


class MptForCausalLM(ClassicDecoder):
    """Neither biases nor biases of norms; queries, keys and values perhaps cut off; exact gelu."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        settings = _mpt_attention(config)
        super().__init__(
            setup,
            options,
            outline=Outline("wte", "blocks", "norm_f", eps=config.layer_norm_epsilon, norm_bias=False),
            make_layer=lambda prefix, _: _mpt_layer(build, prefix, settings),
        )


def _mpt_attention(config: Any) -> Any:
    """The settings of attention; raises `ValueError` for what is not supported."""
    for what, given, all_needed in (("MPT's attention", config.attn_config, _MPT_ATTENTION), ("MPT", config, _MPT)):
        for name, needed in all_needed.items():
            if getattr(given, name) != needed:
                raise ValueError(f"{name} of {what} must be {needed!r}, the checkpoint has {getattr(given, name)!r}")
    return config.attn_config


def _bloom_layer(build: Build, prefix: str) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.self_attention", f"{prefix}.mlp"
    size, eps = config.hidden_size, config.layer_norm_epsilon
    heads, head_dim = plain_heads(config)
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, bias=True, names=("query_key_value",), groups=heads),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5, alibi_slopes=alibi_slopes(heads)),
        build.linear(f"{name}.dense", size, size, bias=True, shard="row"),
    )
    norms = (
        build.norm(f"{prefix}.input_layernorm", size, eps=eps, kind="layer"),
        build.norm(f"{prefix}.post_attention_layernorm", size, eps=eps, kind="layer"),
    )
    part = PlainMLP(build, (f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"), 4 * size, "gelu_new")
    return SequentialLayer(norms, attention, part, keeps_normed=config.apply_residual_connection_post_layernorm)


def _mpt_layer(build: Build, prefix: str, settings: Any) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.attn", f"{prefix}.ffn"
    size, eps = config.hidden_size, config.layer_norm_epsilon
    heads, head_dim = plain_heads(config)
    slopes = alibi_slopes(heads, settings.alibi_bias_max)
    scale = settings.softmax_scale or head_dim**-0.5
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, names=("Wqkv",)),
        build.attention(name, heads, heads, head_dim, scale=scale, alibi_slopes=slopes),
        build.linear(f"{name}.out_proj", size, size, shard="row"),
        clip=settings.clip_qkv or 0.0,
    )
    norms = (
        build.norm(f"{prefix}.norm_1", size, eps=eps, kind="layer", bias=False),
        build.norm(f"{prefix}.norm_2", size, eps=eps, kind="layer", bias=False),
    )
    inner = config.expansion_ratio * size
    part = PlainMLP(build, (f"{mlp}.up_proj", f"{mlp}.down_proj"), inner, "gelu", bias=False)
    return SequentialLayer(norms, attention, part)
