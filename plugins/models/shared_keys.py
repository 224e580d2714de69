"""Attention whose keys and values later layers read, attention that reads them, and embeddings for each layer.

Gemma 3n and Gemma 4 have these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep
from frame.layers import RotaryEmbedding, WeightSlot, normed_linear

from .decoder import sliding_window
from .norms import NormSpec, UnweightedNorm

#: The keys and values of a step's tokens, each [T, Hk, D], and the attention that keeps them.
Kept = tuple[Tensor, Tensor, nn.Module]


def shares_keys(config: Any, index: int) -> bool:
    """Whether layer `index` reads the keys and values of an earlier layer: the last `num_kv_shared_layers` do.

    Raises `ValueError` where no earlier layer of its type keeps any.
    """
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if index < first:
        return False
    kind = config.layer_types[index]
    if kind not in config.layer_types[: max(first, 0)]:
        raise ValueError(
            f"layer {index} of type {kind!r} shares keys, but no layer of that type before the last "
            f"num_kv_shared_layers={config.num_kv_shared_layers} keeps any"
        )
    return True


class KeepingAttention(nn.Module):
    """Attention with keys and values of its own, which it lends to later layers of its type.

    `heads` are the number of key heads and the width of each. If `equal`, keys before their norm are values too.
    """

    def __init__(
        self, build: Build, name: str, index: int, rotary: RotaryEmbedding, *, heads: tuple[int, int], equal: bool
    ) -> None:
        super().__init__()
        config, (kv_heads, dim) = build.config, heads
        count, bias = config.num_attention_heads, config.attention_bias
        names = ("q_proj", "k_proj", "k_proj" if equal else "v_proj")
        self.inputs = build.attention_input(name, config.hidden_size, count, kv_heads, dim, bias=bias, names=names)
        window = sliding_window(config, index)
        self.attention = build.attention(name, count, kv_heads, dim, scale=1.0, window=window)
        self.output = build.linear(f"{name}.o_proj", count * dim, config.hidden_size, bias=bias, shard="row")
        self.query_norm, self.key_norm = (
            build.norm(f"{name}.{part}", dim, eps=config.rms_norm_eps) for part in ("q_norm", "k_norm")
        )
        self.value_norm = UnweightedNorm(build, dim, NormSpec(config.rms_norm_eps, weighted=False))
        self.rotary, self.kind = rotary, config.layer_types[index]

    def forward(
        self, norm: nn.Module, hidden: Tensor, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> tuple[Tensor, Tensor]:
        """(attention of norm(hidden), hidden); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, None)
        query, key = self.rotary(positions, query, key, (self.query_norm, self.key_norm))
        value = self.value_norm(value)
        kept[self.kind] = key, value, self.attention
        return self.output(self.attention(query, key, value, step)), residual


class SharingAttention(nn.Module):
    """Attention with queries of its own, to the keys and values of the last layer of its kind that has some.

    These are written to that layer's cache once more, which changes nothing there.
    """

    def __init__(self, build: Build, name: str, head_dim: int, rotary: RotaryEmbedding, kind: str) -> None:
        super().__init__()
        config, size = build.config, build.config.num_attention_heads * head_dim
        bias = config.attention_bias
        self.query = build.linear(f"{name}.q_proj", config.hidden_size, size, bias=bias, shard="column")
        self.output = build.linear(f"{name}.o_proj", size, config.hidden_size, bias=bias, shard="row")
        self.query_norm = build.norm(f"{name}.q_norm", head_dim, eps=config.rms_norm_eps)
        self.rotary, self.kind, self.name, self.head_dim = rotary, kind, name, head_dim

    def forward(
        self, norm: nn.Module, hidden: Tensor, positions: Tensor, step: ForwardStep, kept: dict[str, Kept]
    ) -> tuple[Tensor, Tensor]:
        """(attention of norm(hidden), hidden); all [T, hidden_size]."""
        joined, _, residual = normed_linear(norm, self.query, hidden, None)
        query = joined.unflatten(1, (-1, self.head_dim))
        query, _ = self.rotary(positions, query, query[:, :1], (self.query_norm, self.query_norm))
        key, value, attention = kept[self.kind]
        return self.output(attention(query, key, value, step)), residual

    def weight_slots(self) -> list[WeightSlot]:
        """Some files hold keys and values of these layers, which nothing reads."""
        names = [f"{part}_proj.{suffix}" for part in "kv" for suffix in ("weight", "bias")]
        return [WeightSlot(f"{self.name}.{name}", (), None) for name in (*names, "k_norm.weight", "v_norm.weight")]


class PerLayerEmbedding(nn.Module):
    """What is added in each layer: from a table by token and from the embedding of the model, joined.

    Tokens that the table lacks, as those of pictures, have the entry of token 0.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.num_layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        size, self.scale = self.num_layers * self.width, config.hidden_size**-0.5
        self.words = config.vocab_size_per_layer_input
        self.table = build.embedding("model.embed_tokens_per_layer", self.words, size)
        self.projection = build.linear("model.per_layer_model_projection", config.hidden_size, size)
        self.norm = build.norm("model.per_layer_projection_norm", self.width, eps=config.rms_norm_eps)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids [T], embeddings [T, hidden_size] → [T, num_layers, width]."""
        shape = (-1, self.num_layers, self.width)
        rows = self.table(torch.where(ids < self.words, ids, 0)).view(shape)
        rows = rows * torch.tensor(self.width**0.5, dtype=rows.dtype).item()
        projected: Tensor = self.norm((self.projection(hidden) * self.scale).view(shape))
        joined: Tensor = (projected + rows) * math.sqrt(0.5)
        return joined
