"""MiniMax-01: lightning attention and full attention in turns, routed experts, residuals taken behind the norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, ForwardStep, ModelInputs, ModelSetup, RouterSpec
from frame.layers import LightningAttention, RotaryEmbedding, Router

from .decoder import Decoder, head_shape
from .hybrid import layer_kind, plain_attention


class MiniMaxForCausalLM(Decoder):
    """RMSNorm, whose output is the residual, times α, of the part that reads it, times β."""

    ignores: ClassVar[Sequence[str]] = (
        *Decoder.ignores,
        r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
    )

    def __init__(self, setup: ModelSetup, options: Any = None) -> None:
        build = setup.build
        rotary = RotaryEmbedding(build, head_shape(build.config)[2])
        super().__init__(
            setup,
            options,
            make_layer=lambda prefix, index: MiniMaxLayer(build, prefix, index, rotary),
            partial=False,
        )

    def forward(self, inputs: ModelInputs, step: ForwardStep) -> Tensor:
        hidden = inputs.embedded(self.embed)
        for layer in self.layers:
            hidden = layer(hidden, inputs.positions, step)
        out: Tensor = self.norm(hidden)
        return out


class MiniMaxLayer(nn.Module):
    """x = norm(x); x = α x + β attention(x); x = norm(x); x = α x + β experts(x), with α and β of each part."""

    def __init__(self, build: Build, prefix: str, index: int, rotary: nn.Module) -> None:
        super().__init__()
        config = build.config
        hidden_size, eps, name = config.hidden_size, config.rms_norm_eps, f"{prefix}.self_attn"
        if config.hidden_act != "silu":
            raise ValueError(f"MiniMax's lightning attention is of 'silu', not of {config.hidden_act!r}")
        self.norms = nn.ModuleList(
            build.norm(f"{prefix}.{part}_layernorm", hidden_size, eps=eps) for part in ("input", "post_attention")
        )
        if layer_kind(config.layer_types[index], "linear_attention", "full_attention") == "linear_attention":
            heads = head_shape(config)
            self.attention: nn.Module = LightningAttention(
                build, name, (heads[0], heads[2]), index, config.num_hidden_layers
            )
            factors = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
        else:
            self.attention = plain_attention(build, name, rotary, window=config.sliding_window or 0, reduce=True)
            factors = config.full_attn_alpha_factor, config.full_attn_beta_factor
        self.factors = tuple(float(one) for one in (*factors, config.mlp_alpha_factor, config.mlp_beta_factor))
        moe, count, top_k = f"{prefix}.block_sparse_moe", config.num_local_experts, config.num_experts_per_tok
        self.router = Router(build, f"{moe}.gate", hidden_size, RouterSpec(count, top_k))
        spec = ExpertSpec(count, hidden_size, config.intermediate_size, top_k, names=("w1", "w3", "w2"))
        self.experts = build.experts(f"{moe}.experts", spec)

    def forward(self, hidden: Tensor, positions: Tensor, step: ForwardStep) -> Tensor:
        """[T, hidden_size] → the same."""
        alpha, beta, mlp_alpha, mlp_beta = self.factors
        before, behind = self.norms
        attended, normed = self.attention(nn.Identity(), before(hidden), None, positions, step)
        hidden = behind(normed * alpha + attended * beta)
        out: Tensor = hidden * mlp_alpha + self.experts(hidden, self.router(hidden)) * mlp_beta
        return out
