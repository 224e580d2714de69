"""GPT-NeoX (Pythia, Dolly), its Japanese relative, and Persimmon: queries, keys and values joined head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, Outline, ParallelLayer, SequentialLayer, plain_heads
from .plain_mlp import PlainMLP


class GPTNeoXForCausalLM(ClassicDecoder):
    """Two LayerNorms, whose parts run in parallel or in turn; rotary positions of a part of each head."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^gpt_neox\.", ""), (r"^embed_out\.", "lm_head."))
    ignores: ClassVar[Sequence[str]] = (
        *ClassicDecoder.ignores,
        r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        config = setup.build.config
        bias = config.attention_bias
        super().__init__(
            setup,
            options,
            outline=Outline("embed_in", norm="final_layer_norm", eps=config.layer_norm_eps),
            make_layer=_maker(
                setup.build, config.intermediate_size, bias=(bias, bias, True), parallel=config.use_parallel_residual
            ),
        )


class GPTNeoXJapaneseForCausalLM(ClassicDecoder):
    """Parts in turn, without biases but one: that of the last layer's attention."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^gpt_neox_japanese\.", ""),
        (r"^embed_out\.", "lm_head."),
        (r"\.dense_bias$", ".dense.bias"),
    )
    ignores: ClassVar[Sequence[str]] = GPTNeoXForCausalLM.ignores

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        inner, last = int(config.hidden_size * config.intermediate_multiple_size), config.num_hidden_layers - 1
        rotary = RotaryEmbedding(build, plain_heads(config)[1])
        super().__init__(
            setup,
            options,
            outline=Outline("embed_in", norm="final_layer_norm", eps=config.layer_norm_eps),
            make_layer=lambda prefix, index: _layer(build, prefix, rotary, inner, bias=(False, index == last, False)),
        )


class PersimmonForCausalLM(ClassicDecoder):
    """Parts in turn, squared relu, LayerNorms of each query and key head."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^model\.", ""),
        (r"\.self_attn\.", ".attention."),
        (r"^embed_tokens\.", "embed_in."),
        (r"^final_layernorm\.", "final_layer_norm."),
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        config = setup.build.config
        super().__init__(
            setup,
            options,
            outline=Outline("embed_in", norm="final_layer_norm", eps=config.layer_norm_eps),
            make_layer=_maker(setup.build, config.intermediate_size, qk_norm=config.qk_layernorm),
        )


def _maker(build: Build, inner: int, **switches: Any) -> Any:
    rotary = RotaryEmbedding(build, plain_heads(build.config)[1])
    return lambda prefix, index: _layer(build, prefix, rotary, inner, **switches)


def _layer(
    build: Build,
    prefix: str,
    rotary: RotaryEmbedding,
    inner: int,
    *,
    bias: tuple[bool, bool, bool] = (True, True, True),
    parallel: bool = False,
    qk_norm: bool = False,
) -> nn.Module:
    """`bias` says whether the inputs of attention, its output, and the feed-forward part have biases."""
    config, name, mlp = build.config, f"{prefix}.attention", f"{prefix}.mlp"
    size, eps = config.hidden_size, config.layer_norm_eps
    heads, head_dim = plain_heads(config)

    def norm(where: str, dim: int) -> nn.Module:
        return build.norm(where, dim, eps=eps, kind="layer")

    attention = ClassicAttention(
        build.attention_input(
            name, size, heads, heads, head_dim, bias=bias[0], names=("query_key_value",), groups=heads
        ),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.dense", size, size, bias=bias[1], shard="row", reduce=not parallel),
        rotary=rotary,
        norms=(norm(f"{name}.q_layernorm", head_dim), norm(f"{name}.k_layernorm", head_dim)) if qk_norm else None,
    )
    names = f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h"
    part = PlainMLP(build, names, inner, config.hidden_act, bias=bias[2], reduce=not parallel)
    norms = norm(f"{prefix}.input_layernorm", size), norm(f"{prefix}.post_attention_layernorm", size)
    if parallel:
        return ParallelLayer(build, norms[0], attention, part, mlp_norm=norms[1])
    return SequentialLayer(norms, attention, part)
