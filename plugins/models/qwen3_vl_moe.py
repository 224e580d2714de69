"""Qwen3-VL-MoE, text part: Qwen3-MoE, whose experts lie in two tensors a layer, with their inputs first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .decoder import Decoder, head_shape
from .mixture import dense, pre_normed, routed
from .qwen3 import qwen3_attention
from .qwen3_moe import is_sparse


class Qwen3VLMoeForConditionalGeneration(Decoder):
    """Positions have three axes, whose frequencies are mixed. Without pictures they are equal."""

    renames: ClassVar[Sequence[tuple[str, str]]] = ((r"^model\.language_model\.", "model."), *Decoder.renames)
    ignores: ClassVar[Sequence[str]] = (*Decoder.ignores, r"model\.visual\..*")

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2], mixed_axes=True)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary))
        # the text part's configuration does not say what that of the whole does: no checkpoint ties its head
        self.head = build.head("lm_head", build.config.hidden_size, build.config.vocab_size)


def _layer(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    attention = qwen3_attention(build, f"{prefix}.self_attn", 0, rotary)
    if not is_sparse(config, index):
        return pre_normed(build, prefix, attention, dense(build, f"{prefix}.mlp"))
    router = RouterSpec(config.num_experts, config.num_experts_per_tok)
    mlp = routed(build, f"{prefix}.mlp", router, config.moe_intermediate_size, transposed=True)
    return pre_normed(build, prefix, attention, mlp)
