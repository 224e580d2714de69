"""Phi 1 to 2: one LayerNorm that attention and feed-forward part both read, and biases everywhere, also of the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, Outline, ParallelLayer
from .decoder import head_shape
from .plain_mlp import PlainMLP


class PhiForCausalLM(ClassicDecoder):
    """Rotary positions of a part of each head, tanh-gelu."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^(?=(embed_tokens|layers|final_layernorm)\.)", "model."),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        outline = Outline(
            "model.embed_tokens",
            "model.layers",
            "model.final_layernorm",
            eps=build.config.layer_norm_eps,
            head_bias=True,
        )
        super().__init__(
            setup, options, outline=outline, make_layer=lambda prefix, index: _layer(build, prefix, rotary)
        )


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.self_attn", f"{prefix}.mlp"
    size, eps = config.hidden_size, config.layer_norm_eps
    num_heads, num_kv_heads, head_dim = head_shape(config)
    norms = None
    if config.qk_layernorm:
        norms = (
            build.norm(f"{name}.q_layernorm", head_dim, eps=eps, kind="layer"),
            build.norm(f"{name}.k_layernorm", head_dim, eps=eps, kind="layer"),
        )
    attention = ClassicAttention(
        build.attention_input(name, size, num_heads, num_kv_heads, head_dim, bias=True),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.dense", num_heads * head_dim, size, bias=True, shard="row", reduce=False),
        rotary=rotary,
        norms=norms,
    )
    names = f"{mlp}.fc1", f"{mlp}.fc2"
    part = PlainMLP(build, names, config.intermediate_size, config.hidden_act, reduce=False)
    return ParallelLayer(build, build.norm(f"{prefix}.input_layernorm", size, eps=eps, kind="layer"), attention, part)
