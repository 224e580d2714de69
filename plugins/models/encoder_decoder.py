"""Models of an encoder and a decoder: their layers, and the order in which both run.

The encoder computes all tokens of the requests that begin in a step; cross-attention keeps what it gives as keys and
values, so that later steps run the decoder alone. Each family's file gives norms, positions, sizes and names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs
from frame.layers import CrossAttention, over_encoder

from .classic import ClassicAttention


class Across(nn.Module):
    """Attention of the decoder's tokens over what the encoder gave for their request.

    `names` are what the checkpoint calls the projections of queries, keys and values, and the output's.
    """

    def __init__(
        self, build: Build, prefix: str, heads: int, head_dim: int, names: Sequence[str], *, scale: float, bias: bool
    ) -> None:
        super().__init__()
        size, inner, (query, key, value, output) = build.config.hidden_size, heads * head_dim, names
        self.attention = CrossAttention(build, prefix, heads, head_dim, scale=scale)
        self.query = build.linear(f"{prefix}.{query}", size, inner, bias=bias, shard="column")
        parts = {key: inner, value: inner}
        with over_encoder(build):
            self.key_value = build.linear(prefix, size, 2 * inner, bias=bias, shard="column", parts=parts)
        self.output = build.linear(f"{prefix}.{output}", inner, size, bias=bias, shard="row")
        self.shape = self.attention.spec.num_heads, head_dim

    def forward(self, normed: Tensor, encoded: Tensor, step: ForwardStep) -> Tensor:
        """normed [T, hidden_size], encoded [E, hidden_size] → [T, hidden_size]."""
        query = self.query(normed).unflatten(1, self.shape)
        if len(encoded):
            key, value = (part.unflatten(1, self.shape) for part in self.key_value(encoded).chunk(2, dim=1))
        else:
            key = value = query.new_empty((0, *self.shape))
        out: Tensor = self.output(self.attention(query, key, value, step))
        return out


class CrossLayer(nn.Module):
    """A layer of a decoder: attention to its own tokens, to the encoder's, and the feed-forward part.

    `norms` come before each part in turn or, unless `before`, behind its sum with what it was given.
    """

    def __init__(
        self, norms: Sequence[nn.Module], attention: ClassicAttention, across: Across, mlp: nn.Module, *, before: bool
    ) -> None:
        super().__init__()
        self.attention_norm, self.across_norm, self.mlp_norm = norms
        self.attention, self.across, self.mlp, self.before = attention, across, mlp, before

    def forward(self, hidden: Tensor, positions: Tensor, encoded: Tensor, step: ForwardStep) -> Tensor:
        """hidden [T, hidden_size], positions int64 [1, T], encoded [E, hidden_size] → [T, hidden_size]."""
        if self.before:
            hidden = hidden + self.attention(self.attention_norm(hidden), positions, step)
            hidden = hidden + self.across(self.across_norm(hidden), encoded, step)
            out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
            return out
        hidden = self.attention_norm(hidden + self.attention(hidden, positions, step))
        hidden = self.across_norm(hidden + self.across(hidden, encoded, step))
        out = self.mlp_norm(hidden + self.mlp(hidden))
        return out


class Stack(nn.Module):
    """The layers of one side between what makes its first hidden states and its last norm, where it has these.

    `places` are called as `LearnedPositions`.
    """

    def __init__(self, places: nn.Module, first: nn.Module, layers: nn.ModuleList, last: nn.Module) -> None:
        super().__init__()
        self.places, self.first, self.layers, self.last = places, first, layers, last

    def forward(self, embedded: Tensor, positions: Tensor, *arguments: Any) -> Tensor:
        """embedded [T, hidden_size], positions int64 [T] → [T, hidden_size]; layers get the `arguments`, too."""
        hidden = self.first(self.places(embedded, positions))
        for layer in self.layers:
            hidden = layer(hidden, positions[None], *arguments)
        out: Tensor = self.last(hidden)
        return out


class EncoderDecoder(Model):
    """The subclass makes `tokens`, which embeds those of the decoder and maybe of both sides, both sides and `head`."""

    needs_python: ClassVar[bool] = True  # the encoder runs in some steps, and in each on another number of tokens
    needs_ids: bool = True

    tokens: nn.Module
    encoder: Stack
    decoder: Stack
    head: nn.Module

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] of the decoder → [T, hidden_size], without positions."""
        rows: Tensor = self.tokens(ids)
        return rows

    def embed_read(self, ids: Tensor) -> Tensor:
        """As `embed`, of the encoder."""
        return self.embed(ids)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, ids, places = inputs.embedded(self.embed), inputs.encoder_ids, inputs.encoder_positions
        encoded = hidden[:0]
        if ids is not None and places is not None and len(ids):
            encoded = self.encoder(self.embed_read(ids), places, step)
        out: Tensor = self.decoder(hidden, inputs.positions[0], encoded, step)
        return out

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor: ...
