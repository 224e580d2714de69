"""Parts of hybrid families, whose layers are attention or a mixer with a state: attention without positions, names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from frame.interfaces import Build, ForwardStep
from frame.layers import Mamba2Spec, step_range

from .decoder import RotaryAttention, head_shape

#: What configurations call the kinds of layers, by the newer name of each.
_KINDS = {"mamba": "linear_attention", "mamba2": "linear_attention", "attention": "full_attention"}


def layer_kind(given: str, *known: str) -> str:
    """The newer name of a kind of layers; raises `ValueError` for one that is not among the `known`."""
    kind = _KINDS.get(given, given)
    if kind not in known:
        raise ValueError(f"no layer type {given!r}; there are: {', '.join(known)}")
    return kind


class FeedForward(nn.Module):
    """Lets a feed-forward part, called as (norm, hidden, residual), stand where mixers and attention do."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """As the part."""
        del positions, step
        out: tuple[Tensor, Tensor] = self.part(norm, hidden, residual)
        return out


def plain_attention(
    build: Build,
    prefix: str,
    rotary: nn.Module,
    *,
    scale: float = 0.0,
    window: int = 0,
    bias: bool = False,
    output: str = "o_proj",
    norms: tuple[nn.Module, nn.Module] | None = None,
    reduce: bool = False,
) -> RotaryAttention:
    """Attention whose output is a rank's part of a sum unless it is to `reduce`; `scale` 0 is 1 / √head size."""
    num_heads, num_kv_heads, head_dim = head_shape(build.config)
    hidden_size = build.config.hidden_size
    return RotaryAttention(
        build.attention_input(prefix, hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(prefix, num_heads, num_kv_heads, head_dim, scale=scale or head_dim**-0.5, window=window),
        build.linear(f"{prefix}.{output}", num_heads * head_dim, hidden_size, bias=bias, shard="row", reduce=reduce),
        norms=norms,
    )


def bamba_spec(config: Any, **features: Any) -> Mamba2Spec:
    """The mixer of configurations that name its sizes as Bamba's does."""
    if config.hidden_act != "silu":
        raise ValueError(f"Mamba-2's convolution is followed by 'silu', not by {config.hidden_act!r}")
    inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
    size = config.mamba_d_head
    return Mamba2Spec(
        config.hidden_size,
        config.mamba_n_heads,
        inner // config.mamba_n_heads if size in (None, "auto") else size,
        config.mamba_d_state,
        config.mamba_n_groups,
        config.mamba_d_conv,
        config.rms_norm_eps,
        step_range(config.time_step_limit),
        **{"bias": config.mamba_proj_bias, "conv_bias": config.mamba_conv_bias, **features},
    )
