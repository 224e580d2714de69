"""Zamba2: Mamba-2 mixers; before some of them one of a few transformer blocks, whose weights many layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build, ForwardStep, Model, ModelInputs, ModelSetup
from frame.layers import Mamba2Mixer, Mamba2Spec, RotaryEmbedding

from .hybrid import layer_kind
from .positions import Unturned

_GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "silu": functional.silu}


class Zamba2ForCausalLM(Model):
    """RMSNorm and Mamba-2; shared blocks, which every stage has, read the hidden state beside the embedding."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^(?=(embed_tokens|layers|final_layernorm)\.)", "model."),)
    stage_tensors: ClassVar[Sequence[str]] = ("hidden", "embedded")
    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        super().__init__(setup, options)
        config, self.is_last = build.config, build.stage.last
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        kinds = [layer_kind(one, "linear_attention", "hybrid") for one in config.layers_block_type]
        hybrid = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
        heads = _heads(config)
        rotary = RotaryEmbedding(build, heads[2]) if config.use_mem_rope else Unturned()
        blocks = [
            SharedBlock(build, f"model.layers.{hybrid[number]}.shared_transformer", number, len(hybrid), rotary)
            for number in range(min(config.num_mem_blocks, len(hybrid)))
        ]
        # other layers' names of the shared tensors, where a file repeats them
        others = "|".join(map(str, hybrid[len(blocks) :]))
        self.ignores = (  # type: ignore[misc]  # which layers they are depends on the configuration
            (rf"model\.layers\.({others})\.shared_transformer\..*",) if others else ()
        )

        def layer(index: int) -> nn.Module:
            prefix = f"model.layers.{index}"
            if kinds[index] != "hybrid":
                return MambaLayer(build, prefix)
            use = hybrid.index(index)
            return HybridLayer(build, prefix, blocks[use % len(blocks)], use)

        self.embedding = build.embedding("model.embed_tokens", config.vocab_size, hidden_size)
        self.layers = build.layers(len(kinds), layer)
        self.norm = build.final_norm("model.final_layernorm", hidden_size, eps=eps)
        tied = self.embedding if config.tie_word_embeddings else None
        self.head = build.head("lm_head", hidden_size, config.vocab_size, tied=tied)

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor | dict[str, Tensor]:
        hidden = inputs.embedded(self.embedding)
        embedded = inputs.stage.get("embedded", hidden)
        for layer in self.layers:
            hidden = layer(hidden, embedded, inputs.positions, step)
        out: Tensor = self.norm(hidden)
        return out if self.is_last else {"hidden": out, "embedded": embedded}

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(hidden)
        return out


class MambaLayer(nn.Module):
    """hidden + mixer(norm(hidden + more))."""

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        config = build.config
        self.norm = build.norm(f"{prefix}.input_layernorm", config.hidden_size, eps=config.rms_norm_eps)
        self.mixer = Mamba2Mixer(build, f"{prefix}.mamba", _spec(config))

    def forward(
        self, hidden: Tensor, embedded: Tensor, positions: Tensor, step: ForwardStep, more: Tensor | None = None
    ) -> Tensor:
        """All [T, hidden_size]; `embedded` is read by hybrid layers only."""
        del embedded
        total = hidden if more is None else hidden + more
        out: Tensor = hidden + self.mixer(self.norm, total, None, positions, step)[0]
        return out


class HybridLayer(nn.Module):
    """A shared block, number `use` of all uses, a projection of the layer's own, then a mixer that reads both."""

    def __init__(self, build: Build, prefix: str, block: SharedBlock, use: int) -> None:
        super().__init__()
        hidden_size = build.config.hidden_size
        num_heads, num_kv_heads, head_dim = _heads(build.config)
        self.block, self.use = block, use
        self.attention = build.attention(
            f"{prefix}.shared_transformer.self_attn", num_heads, num_kv_heads, head_dim, scale=(head_dim / 2) ** -0.5
        )
        self.linear = build.linear(f"{prefix}.linear", hidden_size, hidden_size)
        self.mamba = MambaLayer(build, f"{prefix}.mamba_decoder")

    def forward(self, hidden: Tensor, embedded: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """All [T, hidden_size]."""
        both = torch.cat((hidden, embedded), -1)
        more = self.linear(self.block(both, positions, step, self.attention, self.use))
        out: Tensor = self.mamba(hidden, embedded, positions, step, more)
        return out


class SharedBlock(nn.Module):
    """Norm, attention, norm, gated MLP, without residuals; each use has low-rank additions of its own."""

    def __init__(self, build: Build, prefix: str, number: int, num_uses: int, rotary: nn.Module) -> None:
        super().__init__()
        config = build.config
        hidden_size, size, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        num_heads, num_kv_heads, self.head_dim = _heads(config)
        name, wide, bias = f"{prefix}.self_attn", 2 * hidden_size, config.add_bias_linear
        if config.hidden_act not in _GATES:
            raise ValueError(f"no hidden_act {config.hidden_act!r}; there are: {', '.join(_GATES)}")
        self.gate, self.rotary = _GATES[config.hidden_act], rotary
        self.attention_norm = build.norm(f"{prefix}.input_layernorm", wide, eps=eps)
        self.inputs = build.attention_input(name, wide, num_heads, num_kv_heads, self.head_dim)
        self.output = build.linear(f"{name}.o_proj", num_heads * self.head_dim, hidden_size, shard="row")
        self.mlp_norm = build.norm(f"{prefix}.pre_ff_layernorm", hidden_size, eps=eps)
        mlp = f"{prefix}.feed_forward"
        self.gate_up = build.linear(
            f"{mlp}.gate_up_proj", hidden_size, 2 * size, bias=bias, shard="column", pieces=(size, size)
        )
        self.down = build.linear(f"{mlp}.down_proj", size, hidden_size, bias=bias, shard="row")
        uses, rank = range(number, num_uses, config.num_mem_blocks), config.adapter_rank
        self.mlp_adapters = nn.ModuleDict(
            {
                str(use): Adapter(build, f"{mlp}.gate_up_proj_adapter_list.{use}", hidden_size, rank, (size, size))
                for use in uses
            }
        )
        parts = ("q", "k", "v") if config.use_shared_attention_adapter else ()
        self.adapters = nn.ModuleDict(
            {
                f"{part}{use}": Adapter(build, f"{name}.linear_{part}_adapter_list.{use}", wide, rank, (wide,))
                for part in parts
                for use in uses
            }
        )

    def forward(self, both: Tensor, positions: Tensor, step: ForwardStep, attention: nn.Module, use: int) -> Tensor:
        """both [T, 2 · hidden_size] → [T, hidden_size]; `attention` has the cache of use number `use`."""
        normed = self.attention_norm(both)
        query, key, value = self.inputs(normed)
        if len(self.adapters):
            more = (self.adapters[f"{part}{use}"](normed).unflatten(-1, (-1, self.head_dim)) for part in "qkv")
            query, key, value = (one + extra for one, extra in zip((query, key, value), more, strict=True))
        query, key = self.rotary(positions, query, key)
        hidden = self.mlp_norm(self.output(attention(query, key, value, step)))
        gate, up = (self.gate_up(hidden) + self.mlp_adapters[str(use)](hidden)).chunk(2, dim=-1)
        out: Tensor = self.down(self.gate(gate) * up)
        return out


class Adapter(nn.Module):
    """x Aᵀ Bᵀ, of which a rank has its rows of B."""

    def __init__(self, build: Build, prefix: str, width: int, rank: int, pieces: tuple[int, ...]) -> None:
        super().__init__()
        self.first = build.linear(f"{prefix}.0", width, rank)
        self.second = build.linear(f"{prefix}.1", rank, sum(pieces), shard="column", pieces=pieces)

    def forward(self, x: Tensor) -> Tensor:
        """[T, width] → [T, this rank's outputs]."""
        out: Tensor = self.second(self.first(x))
        return out


def _heads(config: Any) -> tuple[int, int, int]:
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if num_kv_heads != num_heads and config.use_shared_attention_adapter:
        raise ValueError(f"Zamba2 with attention adapters has as many key/value heads as heads, not {num_kv_heads}")
    return num_heads, num_kv_heads, 2 * config.hidden_size // num_heads


def _spec(config: Any) -> Mamba2Spec:
    inner = config.mamba_expand * config.hidden_size
    return Mamba2Spec(
        config.hidden_size,
        config.n_mamba_heads,
        inner // config.n_mamba_heads,
        config.mamba_d_state,
        config.mamba_ngroups,
        config.mamba_d_conv,
        1e-5,
        (config.time_step_min, float("inf")),
        bias=config.add_bias_linear,
        reduce=True,
    )
