"""StableLM: LayerNorm, rotary positions of a part of each head, SwiGLU; parts in turn or in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, NormedGatedMLP, Outline, ParallelLayer, SequentialLayer
from .decoder import Decoder, gate_activation, head_shape
from .head_norms import EachHeadNorm


class StableLmForCausalLM(ClassicDecoder):
    """Biases of the inputs of attention, norms of each head and parallel parts are switches."""

    renames: ClassVar[Sequence[tuple[str, str]]] = Decoder.renames

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        outline = Outline("model.embed_tokens", "model.layers", "model.norm", eps=build.config.layer_norm_eps)
        super().__init__(
            setup, options, outline=outline, make_layer=lambda prefix, index: _layer(build, prefix, rotary)
        )


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config, name = build.config, f"{prefix}.self_attn"
    size, eps, parallel = config.hidden_size, config.layer_norm_eps, config.use_parallel_residual
    num_heads, num_kv_heads, head_dim = head_shape(config)
    norms = None
    if config.qk_layernorm:
        norms = (
            EachHeadNorm(build, f"{name}.q_layernorm", num_heads, head_dim, eps=eps, apart=True),
            EachHeadNorm(build, f"{name}.k_layernorm", num_kv_heads, head_dim, eps=eps, apart=True),
        )
    attention = ClassicAttention(
        build.attention_input(name, size, num_heads, num_kv_heads, head_dim, bias=config.use_qkv_bias),
        build.attention(name, num_heads, num_kv_heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.o_proj", num_heads * head_dim, size, shard="row", reduce=not parallel),
        rotary=rotary,
        norms=norms,
    )
    gate = gate_activation(build, config.hidden_act)
    mlp = NormedGatedMLP(build, f"{prefix}.mlp", config.intermediate_size, gate, reduce=not parallel)
    norm = build.norm(f"{prefix}.input_layernorm", size, eps=eps, kind="layer")
    if parallel:
        return ParallelLayer(build, norm, attention, mlp)
    return SequentialLayer(
        (norm, build.norm(f"{prefix}.post_attention_layernorm", size, eps=eps, kind="layer")), attention, mlp
    )
