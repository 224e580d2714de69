"""MiniCPM3: latent attention with half-split positions, dense layers, factors on embeddings, branches and logits."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ModelSetup
from frame.layers import RotaryEmbedding

from .decoder import Decoder, DecoderLayer, GatedMLP, gate_activation
from .latent import LatentAttentionBlock, latent_rotary
from .mixture import Scaled


class MiniCPM3ForCausalLM(Decoder):
    """Each branch is scaled by the depth; the head reads hidden states that are scaled by the width."""

    divides_logits = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        config, rotary = build.config, latent_rotary(build, interleaved=False)
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))
        self.embedding_scale = float(config.scale_emb)
        self.width_scale = (config.dim_model_base or config.hidden_size) / config.hidden_size

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden * self.width_scale)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    hidden_size, eps, layers = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
    factor = 1.0 if config.scale_depth is None else config.scale_depth / math.sqrt(layers)
    attention = LatentAttentionBlock(build, f"{prefix}.self_attn", rotary, bias=bool(config.attention_bias))
    activation, bias = gate_activation(build, config.hidden_act), bool(config.mlp_bias)
    mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, bias=bias)
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps, partial=True),
        Scaled(attention, factor),
        build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps, partial=True),
        Scaled(mlp, factor),
    )
