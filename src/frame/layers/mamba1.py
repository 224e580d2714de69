"""The mixer of Mamba-1: a short convolution and the selective recurrence of each channel, gated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.core.layers.linear import split_evenly
from frame.core.ops.states import ScanWeights

from .normed import normed_linear
from .states import ChannelConv, ConvState, FloatWeights, StateLayer, empty_tensor

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build


@dataclass(frozen=True)
class MambaSpec:
    """Sizes of a mixer: `inner_size` channels with `state_size` numbers each; steps come from `step_rank` numbers."""

    hidden_size: int
    inner_size: int
    state_size: int
    step_rank: int
    conv_width: int
    bias: bool = False
    conv_bias: bool = True


class MambaMixer(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum, under the names "PREFIX.in_proj", "PREFIX.x_proj" ….

    Channels are divided over the tensor group. `norms` are applied to what steps, B and C are made of.
    """

    def __init__(self, build: Build, prefix: str, spec: MambaSpec, norms: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.spec, tensor, inner = spec, build.groups.tensor, spec.inner_size
        count = split_evenly(f"the channels of {prefix}", inner, tensor)
        first = tensor.rank * count
        self.inputs = build.linear(
            f"{prefix}.in_proj", spec.hidden_size, 2 * inner, bias=spec.bias, shard="column", pieces=(inner, inner)
        )
        run = (f"{prefix}.conv1d", inner, first, count)
        conv = ChannelConv(build, spec.conv_width, [run], bias=spec.conv_bias)
        self.conv = ConvState(build, f"{prefix}.conv1d", conv, silu=True)
        self.sizes = (spec.step_rank, spec.state_size, spec.state_size)
        self.selection = build.linear(f"{prefix}.x_proj", inner, sum(self.sizes), shard="row")
        self.norms = nn.ModuleList(norms or [nn.Identity() for _ in self.sizes])
        self.scan = SelectiveScan(build, prefix, spec, slice(first, first + count))
        self.steps = build.linear(f"{prefix}.dt_proj", spec.step_rank, inner, shard="column")  # the scan has its bias
        self.output = build.linear(
            f"{prefix}.out_proj", inner, spec.hidden_size, bias=spec.bias, shard="row", reduce=False
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        projected, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        x, gate = projected.chunk(2, dim=-1)
        x = self.conv(x, step=step)
        parts = self.selection(x).split(self.sizes, dim=-1)
        dt, b, c = (one(part) for one, part in zip(self.norms, parts, strict=True))
        out = self.scan(x, self.steps(dt), b, c, step=step)
        return self.output(out * functional.silu(gate)), residual


class SelectiveScan(StateLayer):
    """The recurrence: x and steps before their bias [T, channels], B and C [T, state_size] → [T, channels]."""

    def __init__(self, build: Build, prefix: str, spec: MambaSpec, mine: slice) -> None:
        channels = mine.stop - mine.start
        inner = spec.inner_size
        kept, share = ((channels, spec.state_size), build.state_dtype), (mine.start, channels, inner)
        super().__init__(build, prefix, {"scan": kept}, {"scan": [share]})
        self.ops = build.ops
        shapes = {"A_log": (inner, spec.state_size), "D": (inner,), "dt_proj.bias": (inner,)}
        self.weights = FloatWeights(build, prefix, shapes, mine)
        self.decay = empty_tensor(build, torch.float32, channels, spec.state_size)

    def finish_load(self) -> None:
        """Called when the last weight has arrived."""
        self.decay.data.copy_(-self.weights["A_log"].exp())

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        weights = ScanWeights(self.decay, self.weights["D"], self.weights["dt_proj.bias"])
        x, dt, b, c = tensors
        return self.ops.selective_scan(x, dt, b, c, weights, self.states["scan"], plan)
