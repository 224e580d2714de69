"""GPT-2: learned positions, LayerNorm, biases everywhere, weights stored as [in, out], head tied to the embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelSetup

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class GPT2LMHeadModel(Model):
    """The original stack of pre-norm layers, with residual sums outside the norms."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^transformer\.", ""),)
    stage_tensors: ClassVar[Sequence[str]] = ("hidden",)
    divides_logits: ClassVar[bool] = True
    ignores: ClassVar[Sequence[str]] = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        config = build.config
        if config.add_cross_attention:
            raise ValueError("GPT-2 with cross-attention (add_cross_attention=true) is not supported")
        hidden_size, vocab_size = config.hidden_size, config.vocab_size
        self.tokens = build.embedding("wte", vocab_size, hidden_size)
        self.positions = build.embedding("wpe", config.max_position_embeddings, hidden_size, shard=False)
        self.layers = build.layers(config.num_hidden_layers, lambda index: GPT2Layer(build, f"h.{index}", index))
        self.norm = build.final_norm("ln_f", hidden_size, eps=config.layer_norm_epsilon, kind="layer")
        tied = self.tokens if config.tie_word_embeddings else None
        self.head = build.head("lm_head", hidden_size, vocab_size, tied=tied)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden = inputs.embedded(lambda ids: self.tokens(ids) + self.positions(inputs.positions[0]))
        for layer in self.layers:
            hidden = layer(hidden, step)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


class GPT2Layer(nn.Module):
    """hidden + attention(norm(hidden)), then the same with the feed-forward part."""

    def __init__(self, build: Build, prefix: str, index: int) -> None:
        super().__init__()
        config = build.config
        hidden_size, eps, heads = config.hidden_size, config.layer_norm_epsilon, config.num_attention_heads
        inner = config.n_inner or 4 * hidden_size
        head_dim, attn, mlp = hidden_size // heads, f"{prefix}.attn", f"{prefix}.mlp"
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        self.attention_norm = build.norm(f"{prefix}.ln_1", hidden_size, eps=eps, kind="layer")
        self.inputs = build.attention_input(
            attn, hidden_size, heads, heads, head_dim, bias=True, names=("c_attn",), transposed=True
        )
        self.attention = build.attention(attn, heads, heads, head_dim, scale=scale)
        self.output = build.linear(f"{attn}.c_proj", hidden_size, hidden_size, bias=True, shard="row", transposed=True)
        self.mlp_norm = build.norm(f"{prefix}.ln_2", hidden_size, eps=eps, kind="layer")
        self.up = build.linear(f"{mlp}.c_fc", hidden_size, inner, bias=True, shard="column", transposed=True)
        self.down = build.linear(f"{mlp}.c_proj", inner, hidden_size, bias=True, shard="row", transposed=True)
        if config.activation_function not in _ACTIVATIONS:
            names = ", ".join(sorted(_ACTIVATIONS))
            raise ValueError(f"no activation {config.activation_function!r}; there are: {names}")
        self.activation = partial(build.ops.map_rows, _ACTIVATIONS[config.activation_function])

    def forward(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        query, key, value = self.inputs(self.attention_norm(hidden))
        hidden = hidden + self.output(self.attention(query, key, value, step))
        out: Tensor = hidden + self.down(self.activation(self.up(self.mlp_norm(hidden))))
        return out
