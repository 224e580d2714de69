"""The parts of layers that decoder-only families share, and the model around the layers.

Each family's file builds its layers from these parts and gives sizes, names and features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelSetup
from frame.layers import Linear, normed_linear, normed_silu_mul

from .activations import Activation, gate_activation as gate_activation


class GatedMLP(nn.Module):
    """A norm, then down(gate(x) · up(x)), gate and up in one product.

    `activation` takes both halves [T, 2 · intermediate]. The result is a rank's part of a sum unless it is to `reduce`.
    `joined` names the checkpoint's tensor of both gate and up, where they are in one.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        intermediate_size: int,
        activation: Activation,
        *,
        bias: bool = False,
        reduce: bool = False,
        joined: str = "",
    ) -> None:
        super().__init__()
        hidden_size, size = build.config.hidden_size, intermediate_size
        name, parts, pieces = prefix, {"gate_proj": size, "up_proj": size}, tuple[int, ...]()
        if joined:
            name, parts, pieces = f"{prefix}.{joined}", {}, (size, size)
        self.gate_up = build.linear(name, hidden_size, 2 * size, bias=bias, shard="column", parts=parts, pieces=pieces)
        self.down = build.linear(
            f"{prefix}.down_proj", intermediate_size, hidden_size, bias=bias, shard="row", reduce=reduce
        )
        self.activation = activation
        self.is_silu = activation == build.ops.silu_mul

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        gate_up = self.gate_up
        if self.is_silu and isinstance(gate_up, Linear):
            inner, residual = normed_silu_mul(norm, gate_up, hidden, residual)
        else:
            halves, _, residual = normed_linear(norm, gate_up, hidden, residual)
            inner = self.activation(halves)
        return self.down(inner), residual


class RotaryAttention(nn.Module):
    """A norm, projections, the optional `norms` of each query and key head, rotary positions, attention, output."""

    def __init__(
        self,
        inputs: nn.Module,
        rotary: nn.Module,
        attention: nn.Module,
        output: nn.Module,
        *,
        norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.attention, self.output = inputs, attention, output
        self.rotary, self.norms = rotary, norms
        if norms is not None:
            self.query_norm, self.key_norm = norms

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        (query, key, value), _, residual = normed_linear(norm, self.inputs, hidden, residual)
        query, key = self.rotary(positions, query, key, self.norms)
        return self.output(self.attention(query, key, value, step)), residual


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward, the sums carried as a residual that the next norm adds.

    Each part is given the norm before it, so that one kernel can do both. What a part gives is a rank's part of a sum,
    which the norm behind it completes.
    """

    def __init__(self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.mlp_norm, self.mlp = attention_norm, attention, mlp_norm, mlp

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] is what the layer before added to `residual` (None before the first layer)."""
        hidden, residual = self.attention(self.attention_norm, hidden, residual, positions, step)
        out: tuple[Tensor, Tensor] = self.mlp(self.mlp_norm, hidden, residual)
        return out


class SandwichLayer(nn.Module):
    """As `DecoderLayer`, with a second norm behind each part, before it is added. `…_norms` are (before, after)."""

    def __init__(
        self,
        attention_norms: tuple[nn.Module, nn.Module],
        attention: nn.Module,
        mlp_norms: tuple[nn.Module, nn.Module],
        mlp: nn.Module,
    ) -> None:
        super().__init__()
        self.before_attention, self.after_attention = attention_norms
        self.before_mlp, self.after_mlp = mlp_norms
        self.attention, self.mlp = attention, mlp

    def forward(
        self, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, hidden_size] is what the layer before added to `residual` (None before the first layer)."""
        hidden, residual = self.attention(self.before_attention, hidden, residual, positions, step)
        hidden, residual = self.mlp(self.before_mlp, self.after_attention(hidden), residual)
        return self.after_mlp(hidden), residual


class Decoder(Model):
    """Embedding, layers, norm and head under Llama's names ("model.embed_tokens", "model.layers.0", …).

    `make_layer(prefix, index)` makes a layer that is called as (hidden, residual, positions, step) and returns
    (hidden, residual), where hidden is a rank's part of a sum if layers are `partial`. There are `num_layers` of
    them, or as many as `num_hidden_layers` says. `norm` is what follows them where that is no RMSNorm.
    """

    #: a checkpoint of the model without its head has no "model." in its names
    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
    ignores: ClassVar[Sequence[str]] = (r".*rotary_emb\.inv_freq",)
    stage_tensors: ClassVar[Sequence[str]] = ("hidden",)
    divides_logits: ClassVar[bool] = True

    def __init__(
        self,
        setup: ModelSetup,
        options: Any = None,
        *,
        make_layer: Callable[[str, int], nn.Module],
        norm_offset: float = 0.0,
        partial: bool = True,
        norm: nn.Module | None = None,
        num_layers: int = 0,
    ) -> None:
        build = setup.build
        super().__init__(setup, options)
        config, self.ops = build.config, build.ops
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        self.embedding = build.embedding("model.embed_tokens", vocab_size, hidden_size)
        count = num_layers or config.num_hidden_layers
        self.layers = build.layers(count, lambda index: make_layer(f"model.layers.{index}", index))
        self.norm = norm or build.final_norm(
            "model.norm", hidden_size, eps=config.rms_norm_eps, offset=norm_offset, partial=partial
        )
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = build.head("lm_head", hidden_size, vocab_size, tied=tied)

    def embed(self, input_ids: Tensor) -> Tensor:
        """ids [T] → [T, hidden_size]."""
        out: Tensor = self.embedding(input_ids)
        return out

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden, positions = inputs.embedded(self.embed), inputs.positions
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, positions, step)
        out: Tensor = self.norm(hidden, residual)[0]
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


def head_shape(config: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, head size) of a configuration; newer ones name the head size."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads, head_dim


def sliding_window(config: Any, index: int) -> int:
    """The window of layer `index`, 0 for full attention, from `layer_types` and `sliding_window`.

    Raises `ValueError` for a layer of another type.
    """
    kind = config.layer_types[index]
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer {index} is of type {kind!r}; there are: full_attention, sliding_attention")
    return int(config.sliding_window or 0) if kind == "sliding_attention" else 0


def switched_window(config: Any, index: int) -> int:
    """As `sliding_window`, for families whose `use_sliding_window` turns all windows on or off."""
    return sliding_window(config, index) if config.use_sliding_window else 0
