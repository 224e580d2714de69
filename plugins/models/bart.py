"""BART, with LayerNorm behind each part, and mBART, before it: positions from the third row on, normed embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup
from frame.layers import WeightSlot, over_encoder

from .added_positions import LearnedPositions
from .classic import ClassicAttention, PostNormLayer, SequentialLayer
from .encoder_decoder import Across, CrossLayer, EncoderDecoder, Stack
from .plain_mlp import PlainMLP

#: The rows of the tables of positions before that of the first token.
_OFFSET = 2
#: Their LayerNorms have torch's default.
_EPS = 1e-5
_NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")


class LogitsBias(nn.Module):
    """Adds a number to the score of each token."""

    def __init__(self, build: Build, name: str, vocab_size: int) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(
            torch.zeros(1, vocab_size, dtype=build.dtype, device=build.device), requires_grad=False
        )

    def forward(self, logits: Tensor) -> Tensor:
        """[N, vocab_size] → [N, vocab_size]."""
        return logits + self.weight

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(self.name, tuple(self.weight.shape), self.weight, optional=True)]


class Copies(nn.Module):
    """Further `names` under which a checkpoint may hold what a layer reads, perhaps instead of its own name."""

    def __init__(self, layer: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.slots = [
            replace(slot, name=f"{name}.{slot.name.rpartition('.')[2]}", covers=(slot.name,))
            for slot in layer.weight_slots()
            for name in names
        ]

    def weight_slots(self) -> list[WeightSlot]:
        return self.slots


class Unread(nn.Module):
    """A table that a checkpoint may hold and nothing reads."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", (), None)]


class BartForConditionalGeneration(EncoderDecoder):
    """Norms behind each part."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.", ""),)
    ignores: ClassVar[Sequence[str]] = (r"(model\.)?(encoder|decoder)\.version",)
    #: whether norms come before the parts, and one more behind the last layer of each side
    before: ClassVar[bool] = False

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        build, config = setup.build, setup.build.config
        tied, size = bool(config.tie_word_embeddings), (config.vocab_size, config.hidden_size)
        self.tokens = build.embedding("shared" if tied else "decoder.embed_tokens", *size)
        self.read_tokens = self.tokens if tied else build.embedding("encoder.embed_tokens", *size)
        self.copies = (
            Copies(self.tokens, ["encoder.embed_tokens", "decoder.embed_tokens"]) if tied else Unread("shared")
        )
        self.embedding_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        with over_encoder(build):
            self.encoder = self._stack(build, "encoder", config.encoder_layers)
        self.decoder = self._stack(build, "decoder", config.decoder_layers)
        self.head = build.head("lm_head", *reversed(size), tied=self.tokens if tied else None)
        self.logits_bias = LogitsBias(build, "final_logits_bias", config.vocab_size)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.embedding_scale

    def embed_read(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.read_tokens(ids)
        return rows * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.logits_bias(self.head(hidden))
        return out

    def _stack(self, build: Build, side: str, count: int) -> Stack:
        config = build.config
        last: nn.Module = nn.Identity()
        if self.before:
            last = build.final_norm(f"{side}.layer_norm", config.hidden_size, eps=_EPS, kind="layer")
        return Stack(
            LearnedPositions(build, f"{side}.embed_positions", config.max_position_embeddings, offset=_OFFSET),
            build.norm(f"{side}.layernorm_embedding", config.hidden_size, eps=_EPS, kind="layer"),
            build.layers(count, lambda index: _layer(build, side, index, before=self.before)),
            last,
        )


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """Norms before each part."""

    before: ClassVar[bool] = True


def _layer(build: Build, side: str, index: int, *, before: bool) -> nn.Module:
    config, prefix, decodes = build.config, f"{side}.layers.{index}", side == "decoder"
    size, heads = config.hidden_size, getattr(config, f"{side}_attention_heads")
    if size % heads:
        raise ValueError(f"d_model {size} cannot be divided among {heads} attention heads of the {side}")
    head_dim, name = size // heads, f"{prefix}.self_attn"
    attention = ClassicAttention(
        build.attention_input(name, size, heads, heads, head_dim, bias=True, names=_NAMES[:3]),
        build.attention(name, heads, heads, head_dim, scale=head_dim**-0.5, kind="decoder" if decodes else "encoder"),
        build.linear(f"{name}.out_proj", size, size, bias=True, shard="row"),
    )
    parts = ("self_attn", "encoder_attn", "final") if decodes else ("self_attn", "final")
    norms = [build.norm(f"{prefix}.{part}_layer_norm", size, eps=_EPS, kind="layer") for part in parts]
    inner = getattr(config, f"{side}_ffn_dim")
    mlp = PlainMLP(build, (f"{prefix}.fc1", f"{prefix}.fc2"), inner, config.activation_function)
    if not decodes:
        return (SequentialLayer if before else PostNormLayer)((norms[0], norms[1]), attention, mlp)
    across = Across(build, f"{prefix}.encoder_attn", heads, head_dim, _NAMES, scale=head_dim**-0.5, bias=True)
    return CrossLayer(norms, attention, across, mlp, before=before)
