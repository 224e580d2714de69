"""The mixer of Mamba-2: a short convolution, the state-space recurrence of each head, and a gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.core.layers.linear import Linear, Rows, empty_parameter, local_kv_heads, split_evenly
from frame.core.layers.weights import WeightSlot
from frame.core.ops.states import ScanWeights

from .normed import normed_linear
from .states import ChannelConv, FloatWeights, StateLayer, empty_tensor

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build


@dataclass(frozen=True)
class Mamba2Spec:
    """Sizes and features of a mixer. Each of `num_groups` groups of heads shares B and C, and has a norm of its own.

    `output_bias` is as `bias` where it is None. Without `gated_norm` the output is multiplied by silu(gate) alone; with
    `gate_last` the norm comes before the gate. The sum over ranks is completed if it is to `reduce`.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    eps: float
    step_range: tuple[float, float] = (0.0, float("inf"))
    bias: bool = False
    output_bias: bool | None = None
    conv_bias: bool = True
    gated_norm: bool = True
    gate_last: bool = False
    reduce: bool = False

    @property
    def inner_size(self) -> int:
        """Features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """What `in_proj` joins: gate, x, B, C, dt."""
        of_groups = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, of_groups, of_groups, self.num_heads


def step_range(limits: Any) -> tuple[float, float]:
    """`time_step_limit` of a configuration, where null stands for no limits."""
    least, most = limits or (0.0, float("inf"))
    return float(least), float(most)


class Mamba2Mixer(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum, under "PREFIX.in_proj", "PREFIX.conv1d" and so on.

    Heads are divided over the tensor group, and groups with them; groups that are fewer than ranks lie on several.
    """

    def __init__(self, build: Build, prefix: str, spec: Mamba2Spec) -> None:
        super().__init__()
        self.spec, tensor = spec, build.groups.tensor
        heads = split_evenly(f"the heads of {prefix}", spec.num_heads, tensor)
        groups, first_group = local_kv_heads(prefix, spec.num_groups, tensor)
        size, state, rank = heads * spec.head_dim, spec.state_size, tensor.rank
        counts = (size, size, groups * state, groups * state, heads)
        firsts = (rank * size, rank * size, first_group * state, first_group * state, rank * heads)
        self.runs = list(zip(firsts, counts, strict=True))
        rows, base = list[Rows](), 0
        for whole, (first, count) in zip(spec.sizes, self.runs, strict=True):
            rows.append(Rows(f"{prefix}.in_proj", sum(spec.sizes), base + first, count))
            base += whole
        #: what `inputs` gives of gate, x, B, C, dt on this rank
        self.part_sizes = counts
        self.counts = (counts[0], sum(counts[1:4]), counts[4])
        self.inputs = Linear(build, rows, spec.hidden_size, slice(0, spec.hidden_size), bias=spec.bias)
        self.scan = Mamba2Scan(build, prefix, spec, self.runs)
        self.norm = GroupedNorm(build, f"{prefix}.norm", spec.inner_size, spec.num_groups, spec)
        bias = spec.bias if spec.output_bias is None else spec.output_bias
        self.output = build.linear(
            f"{prefix}.out_proj", spec.inner_size, spec.hidden_size, bias=bias, shard="row", reduce=spec.reduce
        )

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        projected, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        return self.mix(projected, step), residual

    def mix(self, projected: Tensor, step: ForwardStep) -> Tensor:
        """What follows `inputs`: [T, this rank's outputs of it] → [T, hidden_size]."""
        gate, mixed, dt = projected.split(self.counts, dim=-1)
        out: Tensor = self.output(self.norm(self.scan(mixed, dt, step=step), gate))
        return out


class Mamba2Scan(StateLayer):
    """The convolution of x, B and C, then the recurrence: (their inputs [T, …], dt [T, H]) → [T, H · head_dim]."""

    def __init__(self, build: Build, prefix: str, spec: Mamba2Spec, runs: list[tuple[int, int]]) -> None:
        _, inner, of_groups, _, _ = spec.sizes
        starts = (0, inner, inner + of_groups)
        name, total = f"{prefix}.conv1d", inner + 2 * of_groups
        channels = [(name, total, at + first, count) for at, (first, count) in zip(starts, runs[1:4], strict=True)]
        first, heads = runs[4]
        conv = ChannelConv(build, spec.conv_width, channels, bias=spec.conv_bias)
        kept = (heads, spec.head_dim, spec.state_size), build.state_dtype
        shares = {"scan": [(first, heads, spec.num_heads)], "conv": conv.shares}
        super().__init__(build, prefix, {"scan": kept, "conv": conv.window}, shares)
        self.spec, self.ops, self.conv = spec, build.ops, conv
        self.sizes = [count for *_, count in channels]
        shapes = dict.fromkeys(("A_log", "D", "dt_bias"), (spec.num_heads,))
        self.weights = FloatWeights(build, prefix, shapes, slice(first, first + heads))
        self.decay = empty_tensor(build, torch.float32, heads)

    def finish_load(self) -> None:
        """Called when the last weight has arrived."""
        self.decay.data.copy_(-self.weights["A_log"].exp())

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        mixed, dt = tensors
        mixed = self.ops.causal_conv(mixed, self.conv.taps, self.conv.bias, self.states["conv"], plan)
        x, b, c = mixed.split(self.sizes, dim=-1)
        weights = ScanWeights(self.decay, self.weights["D"], self.weights["dt_bias"], self.spec.step_range)
        x = x.unflatten(-1, (-1, self.spec.head_dim))
        b, c = (one.unflatten(-1, (-1, self.spec.state_size)) for one in (b, c))
        return self.ops.ssd_scan(x, dt, b, c, weights, self.states["scan"], plan).flatten(1)


class GroupedNorm(nn.Module):
    """RMS norm of x · silu(gate) within each of `num_groups` runs of `dim` features, of which a rank has a share."""

    def __init__(self, build: Build, prefix: str, dim: int, num_groups: int, spec: Mamba2Spec) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.gate_last = prefix, dim, spec.eps, spec.gate_last
        self.group, self.num_groups = build.groups.tensor, num_groups
        count = split_evenly(f"the features of {prefix}", dim, self.group)
        self.first = self.group.rank * count
        self.weight = empty_parameter(build, count) if spec.gated_norm else None

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [T, this rank's features] → the same, in x's dtype."""
        value, factor = x.float(), functional.silu(gate.float())
        if self.weight is None:
            return (value * factor).to(x.dtype)
        if not self.gate_last:
            value = value * factor
        value = self.weight * (value * self._scale(value)).to(x.dtype)
        return (value.float() * factor).to(x.dtype) if self.gate_last else value

    def _scale(self, value: Tensor) -> Tensor:
        """1 / rms of the group of each feature; [T, features], or broadcast over them."""
        width, count = self.dim // self.num_groups, value.shape[-1]
        if count % width == 0:
            squares = value.unflatten(-1, (-1, width)).square().mean(-1, keepdim=True)
            scale: Tensor = (squares + self.eps).rsqrt().expand(*squares.shape[:-1], width).flatten(-2)
            return scale
        sums = value.new_zeros(len(value), self.num_groups)
        mine = slice(self.first // width, self.first // width + 1)
        sums[:, mine] = value.square().sum(-1, keepdim=True)
        scale = (self.group.all_reduce(sums)[:, mine] / width + self.eps).rsqrt()
        return scale

    def weight_slots(self) -> list[WeightSlot]:
        if self.weight is None:
            return []
        mine = slice(self.first, self.first + len(self.weight))
        return [WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight, (mine,))]
