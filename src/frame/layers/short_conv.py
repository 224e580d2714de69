"""The gated short convolution of LFM2: C · conv(B · x), where B, C and x are one product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from frame.core.layers.linear import split_evenly

from .normed import normed_linear
from .states import ChannelConv, ConvState

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build


class ShortConv(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum, under "PREFIX.in_proj", ".conv" and ".out_proj".

    Channels are divided over the tensor group; `bias` is of all three.
    """

    def __init__(self, build: Build, prefix: str, hidden_size: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        tensor = build.groups.tensor
        count = split_evenly(f"the channels of {prefix}", hidden_size, tensor)
        self.inputs = build.linear(
            f"{prefix}.in_proj", hidden_size, 3 * hidden_size, bias=bias, shard="column", pieces=(hidden_size,) * 3
        )
        run = (f"{prefix}.conv", hidden_size, tensor.rank * count, count)
        self.conv = ConvState(build, f"{prefix}.conv", ChannelConv(build, width, [run], bias=bias), silu=False)
        self.output = build.linear(f"{prefix}.out_proj", hidden_size, hidden_size, bias=bias, shard="row", reduce=False)

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        projected, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        before, behind, x = projected.chunk(3, dim=-1)
        return self.output(behind * self.conv(before * x, step=step)), residual
