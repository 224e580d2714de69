"""Mistral 4: DeepSeek's layers, with queries that grow with their positions, and softmax scores of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding

from .deepseek import DeepseekDecoder
from .latent import LatentAttentionBlock


class Mistral4ForCausalLM(DeepseekDecoder):
    """A group of experts is as good as its two best; queries of far positions are scaled up."""

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        config = setup.build.config
        router = RouterSpec(
            config.n_routed_experts,
            config.num_experts_per_tok,
            renormalize=bool(config.norm_topk_prob),
            scale=config.routed_scaling_factor,
            num_groups=config.n_group or 1,
            top_groups=config.topk_group or 1,
            group_score="top2",
        )
        interleaved = bool(config.rope_interleave)
        super().__init__(setup, options, router=router, interleaved=interleaved, attention=_attention)


class Temperature:
    """1 + beta · ln(1 + ⌊position / length⌋), which queries are multiplied with."""

    def __init__(self, beta: float, length: int) -> None:
        self._beta, self._length = beta, length

    def __call__(self, positions: Tensor) -> Tensor:
        """int64 [1, T] → float32 [T]."""
        return 1 + self._beta * torch.log1p(positions[0].div(self._length, rounding_mode="floor").float())


def _attention(build: Build, prefix: str, index: int, rotary: RotaryEmbedding) -> nn.Module:
    del index
    config = build.config
    beta, length = (
        config.rope_parameters.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    temperature = Temperature(float(beta), int(length)) if beta else None
    return LatentAttentionBlock(build, prefix, rotary, bias=bool(config.attention_bias), temperature=temperature)
