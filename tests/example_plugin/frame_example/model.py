"""A model: a decoder with parallel attention and feed-forward parts, made from what `build` hands out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelSetup
from frame.layers import RotaryEmbedding


class ExampleForCausalLM(Model):
    """Every part is named by its place in the checkpoint, after `renames`."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"^trunk\.(\d+)\.mix\.", r"layers.\1.attention."),
        (r"^trunk\.(\d+)\.grow\.", r"layers.\1.mlp."),
        (r"^trunk\.", "layers."),
    )
    stage_tensors: ClassVar[Sequence[str]] = ("hidden",)
    ignores: ClassVar[Sequence[str]] = (r"trunk\.\d+\.cache_hint",)

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        config = build.config
        self.embedding = build.embedding("words", config.vocab_size, config.hidden_size)
        rotary = RotaryEmbedding(build, config.head_dim)
        self.layers = build.layers(config.num_hidden_layers, lambda i: ExampleLayer(build, f"layers.{i}", rotary))
        self.norm = build.final_norm("last_norm", config.hidden_size, eps=config.rms_norm_eps)
        self.head = build.head("head", config.hidden_size, config.vocab_size, tied=self.embedding)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden = inputs.embedded(self.embedding)
        for layer in self.layers:
            hidden = layer(hidden, inputs.positions, step)
        out: Tensor = self.norm(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


class ExampleLayer(nn.Module):
    """hidden + attention(norm(hidden)) + feed-forward(norm(hidden))."""

    def __init__(self, build: Build, prefix: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        config = build.config
        size, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        name, mlp = f"{prefix}.attention", f"{prefix}.mlp"
        self.rotary, self.ops = rotary, build.ops
        self.norm = build.norm(f"{prefix}.norm", size, eps=config.rms_norm_eps)
        self.inputs = build.attention_input(name, size, heads, kv_heads, head_dim, names=("wq", "wk", "wv"))
        self.attention = build.attention(name, heads, kv_heads, head_dim, scale=head_dim**-0.5)
        self.output = build.linear(f"{name}.wo", heads * head_dim, size, shard="row")
        self.gate_up = build.linear(mlp, size, 2 * inner, shard="column", parts={"gate": inner, "up": inner})
        self.down = build.linear(f"{mlp}.down", inner, size, shard="row")

    def forward(self, hidden: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        normed = self.norm(hidden)
        query, key, value = self.inputs(normed)
        query, key = self.rotary(positions, query, key)
        attended: Tensor = self.output(self.attention(query, key, value, step))
        grown: Tensor = self.down(self.ops.silu_mul(self.gate_up(normed)))
        return hidden + attended + grown
