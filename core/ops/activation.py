"""Gated activations: the first half of the last dimension gates the second (Shazeer 2020)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) · up for x [..., 2 · size] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh approximation, for x [..., 2 · size] = (gate, up)."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
