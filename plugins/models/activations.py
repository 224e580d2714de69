"""Activations by the names that checkpoints give them, plain, gated, and one with weights of its own (xIELU).

Plain and gated ones work in place where torch can: their input is the widest tensor of a layer, and nothing else reads
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build
from frame.layers import WeightSlot

Activation = Callable[[Tensor], Tensor]


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu_(x).square_()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_SILU: Activation = partial(functional.silu, inplace=True)
_GELU: Activation = torch.ops.aten.gelu_
_TANH_GELU: Activation = partial(torch.ops.aten.gelu_, approximate="tanh")
#: Elementwise functions, by transformers' names. "gelu" is the exact one; families that mean another say so themselves.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_accurate": _TANH_GELU,
    "gelu_python_tanh": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu_,
    "relu2": _relu_squared,
    "tanh": torch.tanh_,
}


def _known(name: str, kind: str) -> Activation:
    if name not in ACTIVATIONS:
        raise ValueError(f"no {kind} {name!r}; there are: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def plain_activation(build: Build, name: str) -> Activation:
    """The elementwise function called `name`, of x [T, dim], which it may overwrite.

    Raises `ValueError` for an unknown one.
    """
    return partial(build.ops.map_rows, _known(name, "activation"))


def gate_activation(build: Build, name: str) -> Activation:
    """What makes f(gate) · up [T, size] of both halves [T, 2 · size], f being the function called `name`.

    It may overwrite the halves. Raises `ValueError` for an unknown one.
    """
    function = _known(name, "gated activation")
    if function is _SILU:
        return build.ops.silu_mul
    if function is _TANH_GELU:
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
