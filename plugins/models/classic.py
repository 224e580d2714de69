"""The parts of older decoders: LayerNorm, parts that are given what is normed, in turn or in parallel, and the model.

Each family's file builds its layers from these parts and gives sizes, names and features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelSetup
from frame.layers import Linear, RotaryEmbedding, RowLinear

from .added_positions import NoPositions


class NormedGatedMLP(nn.Module):
    """down(gate(x) · up(x)), of what a norm has given."""

    def __init__(
        self, build: Build, prefix: str, inner_size: int, gate: Callable[[Tensor], Tensor], *, reduce: bool = True
    ) -> None:
        super().__init__()
        size, parts = build.config.hidden_size, {"gate_proj": inner_size, "up_proj": inner_size}
        self.gate_up = build.linear(prefix, size, 2 * inner_size, shard="column", parts=parts)
        self.down = build.linear(f"{prefix}.down_proj", inner_size, size, shard="row", reduce=reduce)
        self.gate, self.is_silu = gate, gate == build.ops.silu_mul

    def forward(self, normed: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        if self.is_silu and isinstance(self.gate_up, Linear):
            inner = self.gate_up.silu_mul(normed)
        else:
            inner = self.gate(self.gate_up(normed))
        out: Tensor = self.down(inner)
        return out


class ClassicAttention(nn.Module):
    """Projections, cut off at ±`clip`, norms of queries and keys, rotary positions, attention, output.

    `rotary` and `norms` (of queries, of keys) may be None, and a `clip` of 0 cuts nothing.
    """

    def __init__(
        self,
        inputs: nn.Module,
        attention: nn.Module,
        output: nn.Module,
        *,
        rotary: RotaryEmbedding | None = None,
        norms: tuple[nn.Module, nn.Module] | None = None,
        clip: float = 0.0,
    ) -> None:
        super().__init__()
        self.inputs, self.attention, self.output, self.rotary = inputs, attention, output, rotary
        self.norms, self.clip = norms, clip
        if norms is not None:
            self.query_norm, self.key_norm = norms

    def forward(self, normed: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]; positions int64 [1, T]."""
        heads: tuple[Tensor, Tensor, Tensor] = self.inputs(normed)
        query, key, value = (part.clamp(-self.clip, self.clip) for part in heads) if self.clip else heads
        if self.rotary is not None:
            query, key = self.rotary(positions, query, key, self.norms)
        elif self.norms is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        out: Tensor = self.output(self.attention(query, key, value, step))
        return out


class SequentialLayer(nn.Module):
    """x + attention(norm(x)), then the same with the feed-forward part: `DecoderLayer` with sums outside of norms.

    `norms` are (of attention, of the feed-forward part). With `keeps_normed` parts are added to norm(x), not x (BLOOM).
    """

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module, *, keeps_normed: bool = False
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp, self.keeps_normed = attention, mlp, keeps_normed

    def forward(self, hidden: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        normed = self.attention_norm(hidden)
        hidden = (normed if self.keeps_normed else hidden) + self.attention(normed, positions, step)
        normed = self.mlp_norm(hidden)
        out: Tensor = (normed if self.keeps_normed else hidden) + self.mlp(normed)
        return out


class PostNormLayer(nn.Module):
    """norm(x + attention(x)), then the same with the feed-forward part (the first GPT, OPT-350M)."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, hidden: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        hidden = self.attention_norm(hidden + self.attention(hidden, positions, step))
        out: Tensor = self.mlp_norm(hidden + self.mlp(hidden))
        return out


class ParallelLayer(nn.Module):
    """x + attention(norm(x)) + mlp(norm'(x)), where both norms may be one.

    Both parts are made without reducing: their sum is completed over the ranks once, and none of one of them begins.
    """

    def __init__(
        self, build: Build, norm: nn.Module, attention: nn.Module, mlp: nn.Module, *, mlp_norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp = norm, attention, mlp_norm, mlp
        self.group = build.groups.tensor
        for module in (*attention.modules(), *mlp.modules()):
            if isinstance(module, RowLinear):
                module.begins = False

    def forward(self, hidden: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        normed = self.norm(hidden)
        added: Tensor = self.attention(normed, positions, step)
        added = added + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        return hidden + (self.group.all_reduce(added) if self.group.size > 1 else added)


class EmbeddingNorm(nn.Module):
    """A LayerNorm of the embeddings, where others add positions."""

    def __init__(self, build: Build, prefix: str, eps: float, *, bias: bool = True) -> None:
        super().__init__()
        self.norm = build.norm(prefix, build.config.hidden_size, eps=eps, kind="layer", bias=bias)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        del positions
        out: Tensor = self.norm(hidden)
        return out


@dataclass(frozen=True)
class Outline:
    """What a model has around its layers, by checkpoint names: tokens, layers, final norm ("": none), head.

    `logit_scale` multiplies what the head gives, `embedding_scale` the rows of tokens.
    """

    tokens: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    eps: float = 1e-5
    norm_bias: bool = True
    head_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


class ClassicDecoder(Model):
    """Embedding, positions, layers, norm and head.

    `make_layer(prefix, index)` makes a layer that is called as (hidden, positions, step) and returns hidden.
    `places` adds positions to embeddings, as `LearnedPositions`.
    """

    stage_tensors: ClassVar[Sequence[str]] = ("hidden",)
    divides_logits: ClassVar[bool] = True
    ignores: ClassVar[Sequence[str]] = (r".*\.rotary_emb\.inv_freq", r".*\.attn\.(bias|masked_bias)")

    def __init__(
        self,
        setup: ModelSetup,
        options: Any = None,
        *,
        outline: Outline,
        make_layer: Callable[[str, int], nn.Module],
        places: nn.Module | None = None,
    ) -> None:
        build = setup.build
        super().__init__(setup, options)
        config, self.around = build.config, outline
        width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        self.width = width
        self.tokens = build.embedding(outline.tokens, config.vocab_size, width)
        self.places = places or NoPositions()
        self.layers = build.layers(
            config.num_hidden_layers, lambda index: make_layer(f"{outline.layers}.{index}", index)
        )
        self.norm: nn.Module = nn.Identity()
        if outline.norm:
            self.norm = build.final_norm(
                outline.norm, config.hidden_size, eps=outline.eps, kind="layer", bias=outline.norm_bias
            )
        tied = self.tokens if config.tie_word_embeddings else None
        self.head = build.head(outline.head, width, config.vocab_size, tied=tied, bias=outline.head_bias)

    @property
    def embed_size(self) -> int:
        return int(self.width)

    def embed(self, input_ids: Tensor) -> Tensor:
        """ids [T] → [T, hidden_size], without positions."""
        rows: Tensor = self.tokens(input_ids)
        return rows if self.around.embedding_scale == 1 else rows * self.around.embedding_scale

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, positions = inputs.embedded(self.embed), inputs.positions
        if not inputs.stage:
            hidden = self.places(hidden, positions[0])
        for layer in self.layers:
            hidden = layer(hidden, positions, step)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out if self.around.logit_scale == 1 else out * self.around.logit_scale


def plain_heads(config: Any) -> tuple[int, int]:
    """(heads, head size) of a family whose heads share the hidden size evenly; raises `ValueError` if they cannot."""
    heads, size = config.num_attention_heads, config.hidden_size
    if size % heads:
        raise ValueError(f"hidden_size {size} cannot be divided among {heads} attention heads")
    return heads, size // heads
