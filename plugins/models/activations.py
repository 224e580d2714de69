"""Activations by the names that checkpoints give them, plain, gated, and one with weights of its own (xIELU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build
from frame.layers import WeightSlot

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return functional.relu(x).square()


#: Elementwise functions, by transformers' names. "gelu" is the exact one; families that mean another say so themselves.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_python": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
}


def _known(name: str, kind: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"no {kind} {name!r}; there are: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def plain_activation(build: Build, name: str) -> Activation:
    """The elementwise function called `name`, [T, dim] → the same; raises `ValueError` for an unknown one."""
    return partial(build.ops.map_rows, _known(name, "activation"))


def gate_activation(build: Build, name: str) -> Activation:
    """What makes f(gate) · up [T, size] of both halves [T, 2 · size], f being the function called `name`.

    Raises `ValueError` for an unknown one.
    """
    function = _known(name, "gated activation")
    if function is functional.silu:
        return build.ops.silu_mul
    if function is _gelu_tanh:
        return build.ops.gelu_tanh_mul
    return partial(build.ops.map_rows, partial(_gated, function))


def _gated(function: Activation, halves: Tensor) -> Tensor:
    gate, up = halves.chunk(2, dim=-1)
    return function(gate) * up


class XIELU(nn.Module):
    """αp x² + β x above 0, αn (exp(min(x, ε)) - 1 - x) + β x below (xIELU, arXiv 2411.13010).

    αp = softplus(alpha_p) and αn = β + softplus(alpha_n) are learned; β and ε are constants, which files may omit.
    """

    beta: Tensor
    eps: Tensor
    slopes: Tensor

    def __init__(self, build: Build, prefix: str) -> None:
        super().__init__()
        self.prefix, self.ops = prefix, build.ops
        dtype, device = build.dtype, build.device
        self.alpha = nn.Parameter(torch.empty(2, dtype=dtype, device=device), requires_grad=False)
        self.register_buffer("beta", torch.full((1,), 0.5, dtype=dtype, device=device))
        self.register_buffer("eps", torch.full((1,), -1e-6, dtype=dtype, device=device))
        self.register_buffer("slopes", torch.zeros(2, dtype=dtype, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] → [T, dim]."""
        return self.ops.map_rows(self._compute, x)

    def _compute(self, x: Tensor) -> Tensor:
        above, below = self.slopes
        linear = self.beta * x
        curved = torch.expm1(torch.minimum(x, self.eps)) - x
        return torch.where(x > 0, above * x * x, curved * below) + linear

    def finish_load(self) -> None:
        """Computes αp and αn, at an address that recorded steps may hold."""
        self.slopes.copy_(functional.softplus(self.alpha))
        self.slopes[1:] += self.beta

    def weight_slots(self) -> list[WeightSlot]:
        first, second = (slice(0, 1),), (slice(1, 2),)
        return [
            WeightSlot(f"{self.prefix}.alpha_p", (1,), self.alpha, region=first),
            WeightSlot(f"{self.prefix}.alpha_n", (1,), self.alpha, region=second),
            WeightSlot(f"{self.prefix}.beta", (), self.beta, optional=True),
            WeightSlot(f"{self.prefix}.eps", (), self.eps, optional=True),
        ]
