"""MiMo-V2-Flash: values narrower than keys, sinks and twice the key/value heads where layers have windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ForwardStep, ModelSetup
from frame.layers import Linear, RotaryEmbedding, Rows, normed_linear

from .decoder import Decoder, sliding_window
from .glm4_moe import grouped_experts
from .mixture import pre_normed


class MiMoV2FlashForCausalLM(Decoder):
    """RMSNorm, rotary positions of a part of each head, windows with sinks in most layers, routed SwiGLU experts."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (*Decoder.renames, (r"\.attention_sink_bias$", ".sinks"))
    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r"model\.mtp\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config = build.config
        kinds = sorted(set(config.layer_types))
        turns = {kind: RotaryEmbedding(build, config.head_dim, layer_type=kind) for kind in kinds}

        def make_layer(prefix: str, index: int) -> nn.Module:
            attention = NarrowValues(build, f"{prefix}.self_attn", index, turns[config.layer_types[index]])
            sparse = config.mlp_layer_types[index] == "sparse"
            return pre_normed(build, prefix, attention, grouped_experts(build, f"{prefix}.mlp", sparse=sparse))

        super().__init__(setup, options, make_layer=make_layer)


def _window(config: Any, index: int) -> int:
    """As `sliding_window`; the published `sliding_window_size`, which goes first, counts the tokens before a query."""
    window, before = sliding_window(config, index), getattr(config, "sliding_window_size", None)
    return before + 1 if window and before is not None else window


class NarrowValues(nn.Module):
    """Attention whose values, scaled by a constant, are filled up with zeros to the width of keys, as in the cache."""

    def __init__(self, build: Build, name: str, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config, group = build.config, build.groups.tensor
        windowed = config.layer_types[index] == "sliding_attention"
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads * (1 + windowed)
        self.head_dim, self.value_dim = config.head_dim, config.v_head_dim
        if self.value_dim > self.head_dim:
            raise ValueError(
                f"v_head_dim is {self.value_dim}; values are served up to the width of keys, {self.head_dim}"
            )
        repeats = kv_heads < group.size and group.size % kv_heads == 0
        own = 1 if repeats else kv_heads // group.size  # of a number that does not divide, `attention` complains below
        first = group.rank * kv_heads // group.size if repeats else group.rank * own
        parts = (
            ("q_proj", heads, group.rank * (heads // group.size), heads // group.size, self.head_dim),
            ("k_proj", kv_heads, first, own, self.head_dim),
            ("v_proj", kv_heads, first, own, self.value_dim),
        )
        self.attention = build.attention(
            name,
            heads,
            kv_heads,
            self.head_dim,
            scale=self.head_dim**-0.5,
            window=_window(config, index),
            sinks=windowed,
        )
        rows = [Rows(f"{name}.{part}", all_ * dim, start * dim, count * dim) for part, all_, start, count, dim in parts]
        every = slice(0, config.hidden_size)
        self.inputs = Linear(build, rows, config.hidden_size, every, bias=config.attention_bias)
        self.sizes = [part.count for part in rows]
        self.output = build.linear(
            f"{name}.o_proj", heads * self.value_dim, config.hidden_size, shard="row", reduce=False
        )
        self.rotary, self.scale = rotary, config.attention_value_scale

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        joined, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        query, key, value = joined.split(self.sizes, dim=-1)
        query, key = (part.unflatten(-1, (-1, self.head_dim)) for part in (query, key))
        query, key = self.rotary(positions, query, key)
        value = value.unflatten(-1, (-1, self.value_dim))
        value = value if self.scale is None else value * self.scale
        wide = functional.pad(value, (0, self.head_dim - self.value_dim))
        out = self.attention(query, key, wide, step).unflatten(-1, (-1, self.head_dim))
        return self.output(out[..., : self.value_dim].flatten(1)), residual
