"""Falcon: one key/value head (7B), groups of them (40B, 180B, 11B), or ALiBi and parts in turn (RW)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .added_positions import alibi_slopes
from .classic import ClassicAttention, ClassicDecoder, Outline, ParallelLayer, SequentialLayer, plain_heads
from .plain_mlp import PlainMLP


class FalconForCausalLM(ClassicDecoder):
    """LayerNorm, exact gelu, rotary positions or ALiBi, parts in parallel or in turn."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        num_norms = _num_norms(config)
        rotary = None if config.alibi else RotaryEmbedding(build, plain_heads(config)[1])
        super().__init__(
            setup,
            options,
            outline=Outline("word_embeddings", "h", "ln_f", eps=config.layer_norm_epsilon),
            make_layer=lambda prefix, _: _layer(build, prefix, rotary, num_norms),
        )


def _num_norms(config: Any) -> int:
    """The norms that parallel parts read, 0 where parts come in turn; raises `ValueError` for what Falcon never has."""
    grouped, stated = config.new_decoder_architecture, config.num_ln_in_parallel_attn
    if not config.parallel_attn:
        if grouped:
            raise ValueError("parallel_attn must be true with new_decoder_architecture")
        return 0
    number = (2 if grouped else 1) if stated is None else stated
    choices = (1, 2) if grouped else (1,)
    if number not in choices:
        there_are = " or ".join(map(str, choices))
        raise ValueError(f"num_ln_in_parallel_attn must be {there_are} in this Falcon, the checkpoint has {number}")
    return int(number)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding | None, num_norms: int) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.self_attention", f"{prefix}.mlp"
    size, bias, alone = config.hidden_size, config.bias, num_norms == 0
    heads, head_dim = plain_heads(config)
    kv_heads, groups = heads, heads
    if config.new_decoder_architecture:
        kv_heads = groups = config.num_kv_heads
    elif config.multi_query:
        kv_heads = groups = 1
    scale, slopes = head_dim**-0.5, None
    if config.alibi:
        # added before scores are scaled, and rounded as in training; the product with a distance is not
        slopes = alibi_slopes(heads).to(torch.bfloat16).float() * scale
    attention = ClassicAttention(
        build.attention_input(
            name, size, heads, kv_heads, head_dim, bias=bias, names=("query_key_value",), groups=groups
        ),
        build.attention(name, heads, kv_heads, head_dim, scale=scale, alibi_slopes=slopes),
        build.linear(f"{name}.dense", size, size, bias=bias, shard="row", reduce=alone),
        rotary=rotary,
    )
    names = f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"
    part = PlainMLP(build, names, config.ffn_hidden_size, config.activation, bias=bias, reduce=alone)
    first, second = ("ln_attn", "ln_mlp") if num_norms == 2 else ("input_layernorm", "post_attention_layernorm")
    norm = build.norm(f"{prefix}.{first}", size, eps=config.layer_norm_epsilon, kind="layer")
    if num_norms == 1:
        return ParallelLayer(build, norm, attention, part)
    other = build.norm(f"{prefix}.{second}", size, eps=config.layer_norm_epsilon, kind="layer")
    if num_norms == 2:
        return ParallelLayer(build, norm, attention, part, mlp_norm=other)
    return SequentialLayer((norm, other), attention, part)
