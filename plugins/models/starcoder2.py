"""StarCoder 2: LayerNorm and biases, rotary positions, grouped-query attention, perhaps over a window, a plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, Outline, SequentialLayer
from .decoder import Decoder, head_shape
from .plain_mlp import PlainMLP


class Starcoder2ForCausalLM(ClassicDecoder):
    """LayerNorm before each part, biases by `use_bias`."""

    renames: ClassVar[Sequence[tuple[str, str]]] = Decoder.renames

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        outline = Outline("model.embed_tokens", "model.layers", "model.norm", eps=build.config.norm_epsilon)
        super().__init__(
            setup, options, outline=outline, make_layer=lambda prefix, index: _layer(build, prefix, rotary)
        )


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.self_attn", f"{prefix}.mlp"
    size, eps, bias, window = config.hidden_size, config.norm_epsilon, config.use_bias, config.sliding_window or 0
    num_heads, num_kv_heads, head_dim = head_shape(config)
    attention = ClassicAttention(
        build.attention_input(name, size, num_heads, num_kv_heads, head_dim, bias=bias),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, size, bias=bias, shard="row"),
        rotary=rotary,
    )
    norms = (
        build.norm(f"{prefix}.input_layernorm", size, eps=eps, kind="layer"),
        build.norm(f"{prefix}.post_attention_layernorm", size, eps=eps, kind="layer"),
    )
    names = f"{mlp}.c_fc", f"{mlp}.c_proj"
    part = PlainMLP(build, names, config.intermediate_size, config.hidden_act, bias=bias)
    return SequentialLayer(norms, attention, part)
