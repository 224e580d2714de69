"""GPT-J and CodeGen: one LayerNorm that attention and feed-forward part both read, rotary positions of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .classic import ClassicAttention, ClassicDecoder, Outline, ParallelLayer, plain_heads
from .plain_mlp import PlainMLP


class GPTJForCausalLM(ClassicDecoder):
    """Attention without biases, biases elsewhere, also of the head."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)
    ignores: ClassVar[Sequence[str]] = (*ClassicDecoder.ignores, r".*\.attn\.causal_mask")
    #: how `build.attention_input` finds queries, keys and values
    joined: ClassVar[dict[str, Any]] = {}

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        head_dim = plain_heads(config)[1]
        if not config.rotary_dim or config.rotary_dim > head_dim:
            raise ValueError(f"rotary_dim must be from 1 to the head size {head_dim}, got {config.rotary_dim!r}")
        rotary = RotaryEmbedding(build, config.rotary_dim, interleaved=True)
        super().__init__(
            setup,
            options,
            outline=Outline("wte", "h", "ln_f", eps=config.layer_norm_epsilon, head_bias=True),
            make_layer=lambda prefix, _: _layer(build, prefix, rotary, self.joined),
        )


class CodeGenForCausalLM(GPTJForCausalLM):
    """Queries, values and keys, in this order, of each quarter of the heads in one tensor."""

    joined: ClassVar[dict[str, Any]] = {"names": ("qkv_proj",), "groups": 4, "order": "qvk"}


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding, joined: dict[str, Any]) -> nn.Module:
    config, name, mlp = build.config, f"{prefix}.attn", f"{prefix}.mlp"
    size, (heads, head_dim) = config.hidden_size, plain_heads(config)
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, **joined),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5),
        build.linear(f"{name}.out_proj", size, size, shard="row", reduce=False),
        rotary=rotary,
    )
    norm = build.norm(f"{prefix}.ln_1", size, eps=config.layer_norm_epsilon, kind="layer")
    names, inner = (f"{mlp}.fc_in", f"{mlp}.fc_out"), config.n_inner or 4 * size
    return ParallelLayer(
        build, norm, attention, PlainMLP(build, names, inner, config.activation_function, reduce=False)
    )
