"""OLMo Hybrid: gated delta nets between norms as Llama's, attention with norms behind each part as OLMo 2's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from frame.interfaces import Build, ModelSetup
from frame.layers import DeltaHeads, DeltaNetSpec, GatedDeltaNet, HeadsNorm, RotaryEmbedding

from .decoder import Decoder, DecoderLayer, GatedMLP, SandwichLayer, gate_activation, head_shape
from .hybrid import layer_kind, plain_attention
from .norms import Unnormed
from .positions import Unturned


class OlmoHybridForCausalLM(Decoder):
    """RMSNorm, delta nets whose writes may be doubled, attention with or without a rope, SwiGLU."""

    renames: ClassVar[Sequence[tuple[str, str]]] = (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        *Decoder.renames,
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        parameters = getattr(build.config, "rope_parameters", None) or {}
        turns = parameters.get("rope_theta") is not None
        rotary = RotaryEmbedding(build, head_shape(build.config)[2]) if turns else Unturned()
        super().__init__(
            setup, options, make_layer=lambda prefix, index: _layer(build, prefix, index, rotary), partial=False
        )


def _delta_net(build: Build, prefix: str) -> nn.Module:
    config = build.config
    spec = DeltaNetSpec(
        config.hidden_size,
        config.linear_num_value_heads,
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        1e-5,  # not in configurations
        doubles=config.linear_allow_neg_eigval,
        names=("o_norm", "o_proj"),
        reduce=True,
    )
    heads = DeltaHeads.of(build, prefix, spec)
    runs = heads.by_kind([f"{prefix}.{name}_proj" for name in "qkvgba"], joined=False)
    convolutions = [f"{prefix}.{name}_conv1d" for name in "qkv"]
    return GatedDeltaNet(build, prefix, heads, runs, heads.by_kind([*convolutions, "", ""], joined=False)[:3])


def _layer(build: Build, prefix: str, index: int, rotary: nn.Module) -> nn.Module:
    config = build.config
    hidden_size, eps, kind = config.hidden_size, config.rms_norm_eps, config.layer_types[index]
    activation = gate_activation(build, config.hidden_act)
    mlp = GatedMLP(build, f"{prefix}.mlp", config.intermediate_size, activation, reduce=True)
    if layer_kind(kind, "linear_attention", "full_attention") == "linear_attention":
        return DecoderLayer(
            build.norm(f"{prefix}.input_layernorm", hidden_size, eps=eps),
            _delta_net(build, f"{prefix}.linear_attn"),
            build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps),
            mlp,
        )
    num_heads, num_kv_heads, head_dim = head_shape(config)
    name = f"{prefix}.self_attn"
    norms = (
        HeadsNorm(build, f"{name}.q_norm", num_heads, head_dim, eps=eps),
        HeadsNorm(build, f"{name}.k_norm", num_kv_heads, head_dim, eps=eps),
    )
    return SandwichLayer(
        (Unnormed(), build.norm(f"{prefix}.post_attention_layernorm", hidden_size, eps=eps)),
        plain_attention(build, name, rotary, bias=config.attention_bias, norms=norms, reduce=True),
        (Unnormed(), build.norm(f"{prefix}.post_feedforward_layernorm", hidden_size, eps=eps)),
        mlp,
    )
