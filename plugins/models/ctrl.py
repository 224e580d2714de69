"""CTRL: scaled embeddings, positions of sines, LayerNorm before each part, biases everywhere, also of the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup

from .added_positions import SinePositions
from .classic import ClassicAttention, ClassicDecoder, Outline, SequentialLayer, plain_heads
from .plain_mlp import PlainMLP

#: That of the layers; the configuration has the final norm's.
_EPS = 1e-6


class CTRLLMHeadModel(ClassicDecoder):
    """As above; relu."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        outline = Outline(
            "w",
            "h",
            "layernorm",
            eps=config.layer_norm_epsilon,
            head_bias=True,
            embedding_scale=math.sqrt(config.hidden_size),
        )
        super().__init__(
            setup,
            options,
            outline=outline,
            make_layer=lambda prefix, _: _layer(build, prefix),
            places=SinePositions(build, config.hidden_size / 2),
        )


def _layer(build: Build, prefix: str) -> nn.Module:
    config, name = build.config, f"{prefix}.multi_head_attention"
    size, (heads, head_dim) = config.hidden_size, plain_heads(config)
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, bias=True, names=("Wq", "Wk", "Wv")),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.dense", size, size, bias=True, shard="row"),
    )
    norms = (
        build.norm(f"{prefix}.layernorm1", size, eps=_EPS, kind="layer"),
        build.norm(f"{prefix}.layernorm2", size, eps=_EPS, kind="layer"),
    )
    return SequentialLayer(
        norms, attention, PlainMLP(build, (f"{prefix}.ffn.0", f"{prefix}.ffn.2"), config.dff, "relu")
    )
