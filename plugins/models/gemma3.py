"""Gemma 3, the text part: five windowed layers to a full one, each kind with its own rotary base; normalised heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import RotaryAttention, head_shape, sliding_window
from .gemma2 import GemmaDecoder, sandwich


class Gemma3ForCausalLM(GemmaDecoder):
    """RMSNorm around each part, two rotary tables, normalised queries and keys, windows in turn, GeGLU."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        head_dim = head_shape(build.config)[2]
        rotaries = {
            kind: RotaryEmbedding(build, head_dim, layer_type=kind) for kind in sorted(set(build.config.layer_types))
        }
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: _layer(build, prefix, index, rotaries),
            norm_offset=1.0,
            partial=False,
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a checkpoint with vision; the weights of its vision part are not loaded."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^(model\.language_model|language_model\.model)\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
    )
    ignores: ClassVar[Sequence[str]] = (
        *Gemma3ForCausalLM.ignores,
        r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    )


def _layer(build: Build, prefix: str, index: int, rotaries: Mapping[str, RotaryEmbedding]) -> nn.Module:
    config = build.config
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name, bias = f"{prefix}.self_attn", config.attention_bias
    attention = RotaryAttention(
        build.attention_input(name, config.hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotaries[config.layer_types[index]],
        build.attention(
            name,
            num_heads,
            num_kv_heads,
            head_dim,
            scale=config.query_pre_attn_scalar**-0.5,
            window=sliding_window(config, index),
            soft_cap=config.attn_logit_softcapping or 0.0,
        ),
        build.linear(f"{name}.o_proj", num_heads * head_dim, config.hidden_size, bias=bias, shard="row"),
        norms=(
            build.norm(f"{name}.q_norm", head_dim, eps=config.rms_norm_eps, offset=1.0),
            build.norm(f"{name}.k_norm", head_dim, eps=config.rms_norm_eps, offset=1.0),
        ),
    )
    return sandwich(build, prefix, attention)
