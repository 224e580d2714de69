"""The feed-forward part without a gate, and its activations, by the names that checkpoints have for them.

Activations work in place where torch can: their input is the widest tensor of a layer, and nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.interfaces import Build

Activation = Callable[[Tensor], Tensor]


def _relu2(x: Tensor) -> Tensor:
    return torch.relu_(x).square_()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_TANH_GELU: Activation = partial(torch.ops.aten.gelu_, approximate="tanh")
_SILU: Activation = partial(functional.silu, inplace=True)
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_python": torch.ops.aten.gelu_,
    "gelu_accurate": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_new": _TANH_GELU,
    "gelu_python_tanh": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": _quick_gelu,
    "relu": torch.relu_,
    "relu2": _relu2,
    "silu": _SILU,
    "swish": _SILU,
    "tanh": torch.tanh_,
}


def activation(build: Build, name: str) -> Activation:
    """What a checkpoint calls `name`, for x [T, size], which may be overwritten; raises `ValueError` if unknown."""
    if name not in ACTIVATIONS:
        raise ValueError(f"no activation {name!r}; there are: {', '.join(sorted(ACTIVATIONS))}")
    return partial(build.ops.map_rows, ACTIVATIONS[name])


class PlainMLP(nn.Module):
    """down(activation(up(x))); a rank's part of a sum unless it is to `reduce`."""

    def __init__(
        self,
        build: Build,
        names: tuple[str, str],
        inner_size: int,
        function: str,
        *,
        bias: bool = True,
        reduce: bool = True,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        size, (up, down) = build.config.hidden_size, names
        self.up = build.linear(up, size, inner_size, bias=bias, shard="column", transposed=transposed)
        self.down = build.linear(down, inner_size, size, bias=bias, shard="row", transposed=transposed, reduce=reduce)
        self.activation = activation(build, function)

    def forward(self, normed: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: Tensor = self.down(self.activation(self.up(normed)))
        return out
