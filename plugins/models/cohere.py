"""Cohere's Command and Aya: one LayerNorm that attention and feed-forward part both read, and scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, NormedGatedMLP, Outline, ParallelLayer
from .decoder import Decoder, gate_activation, head_shape, sliding_window
from .head_norms import EachHeadNorm


class CohereForCausalLM(ClassicDecoder):
    """Command-R and R+: rotary positions of neighbouring features; R+ normalises queries and keys."""

    renames: ClassVar[Sequence[tuple[str, str]]] = Decoder.renames

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config = build.config
        rotary = RotaryEmbedding(build, head_shape(config)[2], interleaved=True)
        outline = Outline(
            "model.embed_tokens",
            "model.layers",
            "model.norm",
            eps=config.layer_norm_eps,
            norm_bias=False,
            logit_scale=config.logit_scale,
        )
        super().__init__(
            setup,
            options,
            outline=outline,
            make_layer=lambda prefix, index: self.layer(build, prefix, index, rotary),
        )

    def layer(self, build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        """Layer `index`; in the first generation all are alike."""
        del index
        return _layer(build, prefix, rotary, qk_norm=bool(build.config.use_qk_norm))


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command-R7B and Command-A: three layers of windows with rotary positions, then a full one without positions."""

    def layer(self, build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
        """Layer `index`, with a window or without positions."""
        window = sliding_window(build.config, index)
        return _layer(build, prefix, rotary if window else None, window=window)


def _layer(
    build: Build, prefix: str, rotary: RotaryEmbedding | None, *, window: int = 0, qk_norm: bool = False
) -> nn.Module:
    config, name = build.config, f"{prefix}.self_attn"
    size, eps, bias = config.hidden_size, config.layer_norm_eps, config.attention_bias
    num_heads, num_kv_heads, head_dim = head_shape(config)
    norms = None
    if qk_norm:
        norms = (
            EachHeadNorm(build, f"{name}.q_norm", num_heads, head_dim, eps=eps, apart=False),
            EachHeadNorm(build, f"{name}.k_norm", num_kv_heads, head_dim, eps=eps, apart=False),
        )
    attention = ClassicAttention(
        build.attention_input(name, size, num_heads, num_kv_heads, head_dim, bias=bias),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5, window=window),
        build.linear(f"{name}.o_proj", num_heads * head_dim, size, bias=bias, shard="row", reduce=False),
        rotary=rotary,
        norms=norms,
    )
    gate = gate_activation(build, config.hidden_act)
    mlp = NormedGatedMLP(build, f"{prefix}.mlp", config.intermediate_size, gate, reduce=False)
    return ParallelLayer(
        build, build.norm(f"{prefix}.input_layernorm", size, eps=eps, kind="layer", bias=False), attention, mlp
    )
