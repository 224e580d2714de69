"""What experts compute between their products, in Triton; the reference is `gated` of `frame.core.ops.layers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import triton
import triton.language as tl
from torch import Tensor


class Gating(Protocol):
    """As `frame.interfaces.Gating`."""

    @property
    def function(self) -> str:
        """silu, gelu, gelu_tanh, relu or relu2."""

    @property
    def gated(self) -> bool:
        """Whether there are gate and up."""

    @property
    def alpha(self) -> float:
        """The factor of silu's logistic function."""

    @property
    def shift(self) -> float:
        """What is added to up."""

    @property
    def limit(self) -> float:
        """The bound; 0: none."""


@dataclass(frozen=True)
class Silu:
    """Llama's gate."""

    function: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    shift: float = 0.0
    limit: float = 0.0


SILU = Silu()
#: Of the two products, [E, 2I] ([E, I] without a gate) and [E, H]; None: none.
Biases = tuple[Tensor | None, Tensor | None]


def constants(gating: Gating | None) -> dict[str, Any]:
    """What kernels are compiled for; None computes nothing."""
    if gating is None:
        return {"FUNCTION": "", "ALPHA": 1.0, "SHIFT": 0.0, "LIMIT": 0.0}
    alpha, shift, limit = float(gating.alpha), float(gating.shift), float(gating.limit)
    return {"FUNCTION": gating.function, "ALPHA": alpha, "SHIFT": shift, "LIMIT": limit}


@triton.jit
def _logistic(x):
    """1 / (1 + exp(-x)) without overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _active(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr):
    if FUNCTION == "silu":
        x = x * _logistic(x if ALPHA == 1.0 else ALPHA * x)
    elif FUNCTION == "gelu":
        x = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(y)) / 2 is the logistic function of 2y
        x = x * _logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
        if FUNCTION == "relu2":
            x = x * x
    return x


@triton.jit
def gate_times(gate, up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr):
    """What a `Gating` makes of both, in float32."""
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if SHIFT != 0.0:
        up += SHIFT
    return _active(gate, FUNCTION, ALPHA) * up


@triton.jit
def gate_alone(up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """What a `Gating` without a gate makes of its only values, in float32."""
    if LIMIT > 0.0:
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return _active(up, FUNCTION, ALPHA)
