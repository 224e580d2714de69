"""ModernBERT, an encoder or a decoder: rotary positions, windows in two layers of three, norms before parts, GeGLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelOutput, ModelSetup
from frame.layers import RotaryEmbedding

from .activations import gate_activation, plain_activation
from .classic import ClassicAttention, ClassicDecoder, EmbeddingNorm, Outline, SequentialLayer, plain_heads


class ModernBertModel(Model):
    """Gives hidden states. Layers of windows and full layers have rotary bases of their own."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.", ""),)
    ignores: ClassVar[Sequence[str]] = (r"(head|decoder|classifier)\..*",)
    output: ClassVar[ModelOutput] = "hidden"
    default_pooler: ClassVar[str] = "cls"
    whole_prompts: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        config, rotaries = build.config, _rotaries(build)
        # so many tokens on both sides, and the token itself
        traits = Traits(config.local_attention // 2 + 1, True, ("Wqkv",))
        self.tokens = build.embedding("embeddings.tok_embeddings", config.vocab_size, config.hidden_size)
        self.first_norm = _norm(build, "embeddings.norm")
        self.layers = build.layers(
            config.num_hidden_layers, lambda index: _layer(build, f"layers.{index}", index, rotaries, traits)
        )
        self.norm = _norm(build, "final_norm")

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden = self.first_norm(inputs.embedded(self.tokens))
        for layer in self.layers:
            hidden = layer(hidden, inputs.positions, step)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Raises `ValueError`: this model has no head."""
        raise ValueError(f"{type(self).__name__} has no output head, it gives hidden states of size {hidden.shape[-1]}")


class ModernBertForSequenceClassification(ModernBertModel):
    """Scores of classes: classifier(norm(activation(dense(the first token, or the mean of all))))."""

    ignores: ClassVar[Sequence[str]] = ()
    output: ClassVar[ModelOutput] = "classes"

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        super().__init__(setup, options)
        size = config.hidden_size
        self.dense = build.linear("head.dense", size, size, bias=config.classifier_bias)
        self.activation = plain_activation(build, config.classifier_activation)
        self.head_norm = _norm(build, "head.norm")
        self.classifier = build.linear("classifier", size, config.num_labels, bias=True)
        self.choose_pooler(config)

    def choose_pooler(self, config: Any) -> None:
        """Sets what the configuration says; raises `ValueError` for a pooling that there is not."""
        if config.classifier_pooling not in ("cls", "mean"):
            raise ValueError(f"no classifier_pooling {config.classifier_pooling!r}; there are: cls, mean")
        self.default_pooler = config.classifier_pooling  # type: ignore[misc]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, classes]."""
        out: Tensor = self.classifier(self.head_norm(self.activation(self.dense(hidden))))
        return out


class ModernBertForTokenClassification(ModernBertForSequenceClassification):
    """Scores of classes for each token."""

    default_pooler: ClassVar[str] = "all"

    def choose_pooler(self, config: Any) -> None:
        """Each token has a row, whatever the configuration says of sequences."""


class ModernBertDecoderForCausalLM(ClassicDecoder):
    """Causal, with a product, an activation and a norm before the head."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.", ""),)
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build, config = setup.build, setup.build.config
        rotaries, traits = _rotaries(build), Traits(max(config.sliding_window or 0, 0))
        super().__init__(
            setup,
            options,
            outline=Outline(
                "embeddings.tok_embeddings",
                norm="final_norm",
                head="decoder",
                eps=config.norm_eps,
                norm_bias=config.norm_bias,
                head_bias=config.decoder_bias,
            ),
            make_layer=lambda prefix, index: _layer(build, prefix, index, rotaries, traits),
            places=EmbeddingNorm(build, "embeddings.norm", config.norm_eps, bias=config.norm_bias),
        )
        size = config.hidden_size
        self.dense = build.linear("lm_head.dense", size, size, bias=config.classifier_bias)
        self.activation = plain_activation(build, config.classifier_activation)
        self.head_norm = _norm(build, "lm_head.norm")

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.head_norm(self.activation(self.dense(hidden))))


@dataclass(frozen=True)
class Traits:
    """The window of layers that have one, whether tokens see those behind them, and the names of attention's inputs."""

    window: int
    encodes: bool = False
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")


class GeluMLP(nn.Module):
    """down(activation(first half) · second half), both halves in one tensor of the checkpoint."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up = build.linear(f"{prefix}.Wi", size, 2 * inner, bias=bias, shard="column", pieces=(inner, inner))
        self.down = build.linear(f"{prefix}.Wo", inner, size, bias=bias, shard="row")
        self.gate = gate_activation(build, config.hidden_activation)

    def forward(self, normed: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: Tensor = self.down(self.gate(self.up(normed)))
        return out


def _norm(build: Build, prefix: str) -> nn.Module:
    config = build.config
    return build.norm(prefix, config.hidden_size, eps=config.norm_eps, kind="layer", bias=config.norm_bias)


def _rotaries(build: Build) -> Mapping[str, RotaryEmbedding]:
    head_dim, kinds = plain_heads(build.config)[1], sorted(set(build.config.layer_types))
    return {kind: RotaryEmbedding(build, head_dim, layer_type=kind) for kind in kinds}


def _layer(build: Build, prefix: str, index: int, rotaries: Mapping[str, RotaryEmbedding], traits: Traits) -> nn.Module:
    config, name, layer_type = build.config, f"{prefix}.attn", build.config.layer_types[index]
    size, bias, (heads, head_dim) = config.hidden_size, config.attention_bias, plain_heads(config)
    window = traits.window if layer_type == "sliding_attention" else 0
    kind: Literal["encoder_only", "decoder"] = "encoder_only" if traits.encodes else "decoder"
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, bias=bias, names=traits.names),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5, window=window, kind=kind),
        build.linear(f"{name}.Wo", size, size, bias=bias, shard="row"),
        rotary=rotaries[layer_type],
    )
    norms = nn.Identity() if index == 0 else _norm(build, f"{prefix}.attn_norm"), _norm(build, f"{prefix}.mlp_norm")
    return SequentialLayer(norms, attention, GeluMLP(build, f"{prefix}.mlp"))
