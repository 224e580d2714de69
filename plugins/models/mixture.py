"""The feed-forward parts of layers with routed experts: the experts, and the shared ones beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Build, ExpertSpec, RouterSpec
from frame.layers import Experts, Linear, Router, RowLinear

from .activations import Activation
from .decoder import DecoderLayer, GatedMLP, RotaryAttention, gate_activation, head_shape


class SparseMLP(nn.Module):
    """A norm, a router, and the experts that it prefers for each token.

    The result is a rank's part of a sum where `experts` do not reduce, times `factor`.
    """

    def __init__(self, router: Router, experts: nn.Module, *, factor: float = 1.0) -> None:
        super().__init__()
        self.router, self.experts, self.factor = router, experts, factor
        if factor != 1:
            keep_sums_back(experts)

    def forward(self, norm: nn.Module, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        routing, normed, residual = self.router.normed_choice(norm, hidden, residual)
        out: Tensor = self.experts(normed, routing)
        return (out if self.factor == 1 else out * self.factor), residual


class SharedMLP(nn.Module):
    """down(gate(x) · up(x)) of every token: a rank's part of a sum, for the `shared` of `Build.experts`.

    `joined` names the checkpoint's tensor of both gate and up, where they are in one, `down` that of the last product.
    `scale` names the tensor of a product with one output, the logistic function of which weighs the result.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        intermediate_size: int,
        activation: Activation,
        *,
        bias: bool = False,
        joined: str = "",
        down: str = "down_proj",
        scale: str = "",
    ) -> None:
        super().__init__()
        hidden_size, size = build.config.hidden_size, intermediate_size
        parts: Mapping[str, int] = {} if joined else {"gate_proj": size, "up_proj": size}
        pieces = (size, size) if joined else ()
        name = f"{prefix}.{joined}" if joined else prefix
        self.gate_up = build.linear(name, hidden_size, 2 * size, bias=bias, shard="column", parts=parts, pieces=pieces)
        self.down = build.linear(f"{prefix}.{down}", size, hidden_size, bias=bias, shard="row", reduce=False)
        self.scale = build.linear(scale, hidden_size, 1) if scale else None
        self.activation, self.ops = activation, build.ops
        self.is_silu = activation == build.ops.silu_mul

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        gate_up = self.gate_up
        inner = gate_up.silu_mul(x) if self.is_silu and isinstance(gate_up, Linear) else self.activation(gate_up(x))
        out: Tensor = self.down(inner)
        return out if self.scale is None else self.ops.map_rows(torch.sigmoid, self.scale(x)) * out


class Scaled(nn.Module):
    """A part of a layer whose result is multiplied by `factor` before it is added to the residual."""

    def __init__(self, part: nn.Module, factor: float) -> None:
        super().__init__()
        self.part, self.factor = part, factor
        keep_sums_back(part)

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        """(factor · what the part gives, the residual)."""
        out, residual = self.part(*given)
        return out * self.factor, residual


def keep_sums_back(part: nn.Module) -> None:
    """Lets no sum over ranks of what a part gives begin early, as it is changed before the norm that completes it."""
    for module in part.modules():
        if isinstance(module, RowLinear | Experts):
            module.begins = False


def routed(
    build: Build,
    prefix: str,
    router: RouterSpec,
    intermediate_size: int,
    shared: nn.Module | None = None,
    *,
    gate: str = "gate",
    correction: str = "",
    correction_axes: int = 1,
    wide: bool = False,
    factor: float = 1.0,
    reduce: bool = False,
    transposed: bool = False,
) -> SparseMLP:
    """Experts whose tensors are named as Qwen's are, `gate` being the router and `correction` its bias for choosing."""
    config = build.config
    experts = ExpertSpec(
        router.num_experts,
        config.hidden_size,
        intermediate_size,
        router.top_k,
        activation=config.hidden_act,
        transposed=transposed,
    )
    return SparseMLP(
        Router(
            build,
            f"{prefix}.{gate}",
            config.hidden_size,
            router,
            correction=f"{prefix}.{correction}" if correction else None,
            correction_axes=correction_axes,
            wide=wide,
        ),
        build.experts(f"{prefix}.experts", experts, shared, reduce=reduce),
        factor=factor,
    )


def attention_part(
    build: Build,
    name: str,
    rotary: nn.Module,
    *,
    bias: bool = False,
    output_bias: bool = False,
    window: int = 0,
    scale: float = 0.0,
    sinks: bool = False,
    norms: tuple[str, str] | None = None,
    kind: type[RotaryAttention] = RotaryAttention,
) -> RotaryAttention:
    """The attention called `name`; `norms` name those of each query and key head, `scale` replaces D^-1/2."""
    config = build.config
    hidden_size, (num_heads, num_kv_heads, head_dim) = config.hidden_size, head_shape(config)
    pair = None
    if norms is not None:
        first, second = (build.norm(f"{name}.{norm}", head_dim, eps=config.rms_norm_eps) for norm in norms)
        pair = first, second
    return kind(
        build.attention_input(name, hidden_size, num_heads, num_kv_heads, head_dim, bias=bias),
        rotary,
        build.attention(
            name, num_heads, num_kv_heads, head_dim, scale=scale or head_dim**-0.5, window=window, sinks=sinks
        ),
        build.linear(f"{name}.o_proj", num_heads * head_dim, hidden_size, bias=output_bias, shard="row", reduce=False),
        norms=pair,
    )


def pre_normed(
    build: Build, prefix: str, attention: RotaryAttention | nn.Module, mlp: nn.Module, mlp_norm: str = ""
) -> DecoderLayer:
    """Llama's layer around the two parts, the second of which may have another norm than "post_attention_layernorm"."""
    size, eps = build.config.hidden_size, build.config.rms_norm_eps
    return DecoderLayer(
        build.norm(f"{prefix}.input_layernorm", size, eps=eps, partial=True),
        attention,
        build.norm(f"{prefix}.{mlp_norm or 'post_attention_layernorm'}", size, eps=eps, partial=True),
        mlp,
    )


def dense(build: Build, prefix: str, intermediate_size: int | None = None, *, bias: bool = False) -> GatedMLP:
    """The feed-forward part of layers without experts."""
    config: Any = build.config
    activation = gate_activation(build, config.hidden_act)
    return GatedMLP(build, prefix, intermediate_size or config.intermediate_size, activation, bias=bias)
