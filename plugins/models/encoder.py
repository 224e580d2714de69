"""Embeddings, layers and model of encoder-only families; each token attends to all tokens of its prompt.

Each family's file gives prefixes, positions and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelOutput, ModelSetup

from .activations import plain_activation


@dataclass(frozen=True)
class Shape:
    """What configurations call differently: feed-forward size, activation, epsilon, segments, width of embeddings."""

    inner: int
    function: str
    eps: float
    segments: int
    width: int


class EncoderEmbeddings(nn.Module):
    """norm(word + position + segment); positions count from `first_position` on.

    Those that are narrower than the layers are projected (ELECTRA). Families without segments have no table of them.
    """

    def __init__(self, build: Build, first_position: int, shape: Shape) -> None:
        super().__init__()
        config, prefix = build.config, "embeddings"
        size, self.first_position = shape.width, first_position
        self.words = build.embedding(f"{prefix}.word_embeddings", config.vocab_size, size)
        self.positions = build.embedding(
            f"{prefix}.position_embeddings", config.max_position_embeddings, size, shard=False
        )
        self.segments: nn.Module | None = None
        if shape.segments:
            self.segments = build.embedding(f"{prefix}.token_type_embeddings", shape.segments, size, shard=False)
        self.norm = build.norm(f"{prefix}.LayerNorm", size, eps=shape.eps, kind="layer")
        self.project: nn.Module = nn.Identity()
        if size != config.hidden_size:
            self.project = build.linear("embeddings_project", size, config.hidden_size, bias=True)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """[T, hidden_size]; without segments all tokens are of the first text."""
        positions, segments = inputs.positions[0], inputs.segments
        hidden = inputs.embedded(self.words) + self.positions(positions + self.first_position)
        if self.segments is not None:
            hidden = hidden + self.segments(positions.new_zeros(1) if segments is None else segments)
        out: Tensor = self.project(self.norm(hidden))
        return out


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then the same with the feed-forward part."""

    def __init__(self, build: Build, prefix: str, shape: Shape) -> None:
        super().__init__()
        config = build.config
        size, inner, eps = config.hidden_size, shape.inner, shape.eps
        heads, head_dim = config.num_attention_heads, size // config.num_attention_heads
        name = f"{prefix}.attention"
        self.inputs = build.attention_input(
            f"{name}.self", size, heads, heads, head_dim, bias=True, names=("query", "key", "value")
        )
        self.attention = build.attention(
            f"{name}.self", heads, heads, head_dim, scale=head_dim**-0.5, kind="encoder_only"
        )
        self.output = build.linear(f"{name}.output.dense", size, size, bias=True, shard="row")
        self.attention_norm = build.norm(f"{name}.output.LayerNorm", size, eps=eps, kind="layer")
        self.up = build.linear(f"{prefix}.intermediate.dense", size, inner, bias=True, shard="column")
        self.down = build.linear(f"{prefix}.output.dense", inner, size, bias=True, shard="row")
        self.mlp_norm = build.norm(f"{prefix}.output.LayerNorm", size, eps=eps, kind="layer")
        self.activation = plain_activation(build, shape.function)

    def forward(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        query, key, value = self.inputs(hidden)
        hidden = self.attention_norm(self.output(self.attention(query, key, value, step)).add_(hidden))
        out: Tensor = self.mlp_norm(self.down(self.activation(self.up(hidden))).add_(hidden))
        return out


class Encoder(Model):
    """Embeddings and layers under BERT's names ("embeddings.…", "encoder.layer.0.…"); gives hidden states.

    A family that classifies overrides `logits` and `output`, as `LabelsTokens` does.
    """

    ignores: ClassVar[Sequence[str]] = (r".*embeddings\.position_ids", r"pooler\..*", r"(cls|lm_head)\..*")
    output: ClassVar[ModelOutput] = "hidden"
    default_pooler: ClassVar[str] = "cls"
    whole_prompts: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None, *, first_position: int = 0) -> None:
        build = setup.build
        super().__init__(setup, options)
        config = build.config
        kind = getattr(config, "position_embedding_type", "absolute") or "absolute"
        if kind != "absolute":
            raise ValueError(f"position embeddings must be 'absolute', the checkpoint has {kind!r}")
        shape = self.shape(config)
        self.embeddings = EncoderEmbeddings(build, first_position, shape)
        self.layers = build.layers(
            config.num_hidden_layers, lambda index: EncoderLayer(build, f"encoder.layer.{index}", shape)
        )

    def shape(self, config: Any) -> Shape:
        """What the family's configuration says."""
        function, eps = config.hidden_act, config.layer_norm_eps
        return Shape(config.intermediate_size, function, eps, config.type_vocab_size, config.hidden_size)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden: Tensor = self.embeddings(inputs)
        for layer in self.layers:
            hidden = layer(hidden, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises `ValueError`: this model has no head."""
        raise ValueError(f"{type(self).__name__} has no output head, it gives hidden states of size {hidden.shape[-1]}")


class LabelsTokens(Encoder):
    """An encoder with scores of classes for each token, by one product called "classifier"."""

    output: ClassVar[ModelOutput] = "classes"
    default_pooler: ClassVar[str] = "all"

    def __init__(self, setup: ModelSetup, options: Any = None, **arguments: Any) -> None:
        build = setup.build
        super().__init__(setup, options, **arguments)
        self.classifier = build.linear("classifier", build.config.hidden_size, build.config.num_labels, bias=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(hidden)
        return out
