"""GraniteMoE: routed experts, maybe beside a shared one, with factors on embeddings, scores, branches and logits."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ModelSetup, RouterSpec
from frame.layers import RotaryEmbedding, Router

from .decoder import Decoder, gate_activation, head_shape
from .mixture import Scaled, SharedMLP, SparseMLP, attention_part, pre_normed


class GraniteMoeForCausalLM(Decoder):
    """RMSNorm, rotary positions, grouped-query attention, routed SwiGLU experts; each branch is scaled when added."""

    divides_logits: ClassVar[bool] = True

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(setup, options, make_layer=lambda prefix, index: _layer(build, prefix, rotary))

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * float(self.config.embedding_multiplier)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / float(self.config.logits_scaling)


def _layer(build: Build, prefix: str, rotary: RotaryEmbedding) -> nn.Module:
    config = build.config
    bias, factor = config.attention_bias, config.residual_multiplier
    attention = attention_part(
        build, f"{prefix}.self_attn", rotary, bias=bias, output_bias=bias, scale=config.attention_multiplier
    )
    return pre_normed(build, prefix, Scaled(attention, factor), _experts(build, prefix, factor))


def _experts(build: Build, prefix: str, factor: float) -> SparseMLP:
    config = build.config
    number, top_k, hidden_size = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    experts = ExpertSpec(
        number,
        hidden_size,
        config.intermediate_size,
        top_k,
        activation=config.hidden_act,
        joined=("input_linear.weight", "output_linear.weight"),
    )
    shared = None
    if size := getattr(config, "shared_intermediate_size", 0):
        activation = gate_activation(build, config.hidden_act)
        shared = SharedMLP(build, f"{prefix}.shared_mlp", size, activation, joined="input_linear", down="output_linear")
    name = f"{prefix}.block_sparse_moe"
    router = Router(build, f"{name}.router.layer", hidden_size, RouterSpec(number, top_k))
    return SparseMLP(router, build.experts(name, experts, shared, reduce=False), factor=factor)
