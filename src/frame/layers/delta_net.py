"""The gated delta net: a short convolution of queries, keys and values, the delta rule of each head, a gated norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.core.layers.linear import Linear, Rows, empty_parameter, local_kv_heads, split_evenly
from frame.core.layers.weights import WeightSlot

from .normed import normed_linear
from .states import ChannelConv, FloatWeights, Run, StateLayer, empty_tensor

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build

Gate = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DeltaNetSpec:
    """Sizes of a mixer. A key head serves `num_heads` / `num_key_heads` value heads that stand side by side.

    `doubles` says that writes to the state reach up to twice what they replace, `gate` what the gate goes through.
    `names` are those of the norm and the output projection, whose sum over ranks is completed if it is to `reduce`.
    """

    hidden_size: int
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    eps: float
    doubles: bool = False
    gate: Gate = functional.silu
    names: tuple[str, str] = ("norm", "out_proj")
    reduce: bool = False

    @property
    def share(self) -> int:
        """Value heads of a key head."""
        return self.num_heads // self.num_key_heads


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a rank: `count` value heads from `first`, and the key heads that serve them."""

    spec: DeltaNetSpec
    first: int
    count: int
    first_key: int
    count_keys: int

    @classmethod
    def of(cls, build: Build, prefix: str, spec: DeltaNetSpec) -> DeltaHeads:
        """Those of this rank; raises `ValueError` where heads cannot be divided."""
        tensor = build.groups.tensor
        count = split_evenly(f"the heads of {prefix}", spec.num_heads, tensor)
        keys, first_key = local_kv_heads(prefix, spec.num_key_heads, tensor)
        return cls(spec, tensor.rank * count, count, first_key, keys)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Features of queries, keys and values."""
        keys = self.count_keys * self.spec.key_dim
        return keys, keys, self.count * self.spec.value_dim

    def by_kind(self, names: Sequence[str], joined: bool = True) -> list[Run]:
        """Runs of queries, keys, values and then one each of the other names': (name, total, first, count).

        With `joined` the first name is that of one tensor of queries, keys and values; else these have three.
        Of other names the second-last and last hold a number for each head, one before them as many as values.
        """
        spec = self.spec
        keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
        key = self.first_key * spec.key_dim, self.count_keys * spec.key_dim
        value = self.first * spec.value_dim, self.count * spec.value_dim
        if joined:
            whole, name = 2 * keys + values, names[0]
            runs = [(name, whole, key[0], key[1]), (name, whole, keys + key[0], key[1])]
            runs.append((name, whole, 2 * keys + value[0], value[1]))
            others = names[1:]
        else:
            runs = [(names[0], keys, *key), (names[1], keys, *key), (names[2], values, *value)]
            others = names[3:]
        totals = [(values, *value)] * (len(others) - 2) + [(spec.num_heads, self.first, self.count)] * 2
        return runs + [(name, *total) for name, total in zip(others, totals, strict=True)]

    def by_key_head(self, qkvz: str, ba: str) -> list[Run]:
        """As `by_kind`, of tensors that hold for each key head [query; key; values; gates], and [betas; steps]."""
        spec, share = self.spec, self.spec.share
        width = 2 * spec.key_dim + 2 * share * spec.value_dim
        keys = range(self.first_key, self.first_key + self.count_keys)
        each = min(share, self.count)  # value heads of a key head on this rank
        inside = self.first % share if each < share else 0
        value, of_values, heads = inside * spec.value_dim, each * spec.value_dim, range(4)
        starts = (0, spec.key_dim, 2 * spec.key_dim + value, 2 * spec.key_dim + share * spec.value_dim + value)
        counts, total = (spec.key_dim, spec.key_dim, of_values, of_values), spec.num_key_heads * width
        runs = [(qkvz, total, key * width + starts[part], counts[part]) for part in heads for key in keys]
        small = 2 * spec.num_heads
        return runs + [(ba, small, key * 2 * share + at + inside, each) for at in (0, share) for key in keys]


class GatedDeltaNet(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum, or all of it; heads are divided over the tensor group.

    `runs` are the rows of the checkpoint's tensors that make queries, keys, values, gates, betas and steps, and
    `conv_runs` the channels of its convolutions.
    """

    def __init__(
        self, build: Build, prefix: str, heads: DeltaHeads, runs: Sequence[Run], conv_runs: Sequence[Run]
    ) -> None:
        super().__init__()
        spec = heads.spec
        self.spec, values = spec, spec.num_heads * spec.value_dim
        rows = [Rows(name, total, first, count) for name, total, first, count in runs]
        self.inputs = Linear(build, rows, spec.hidden_size, slice(0, spec.hidden_size))
        self.sizes = (sum(heads.sizes), heads.sizes[2], heads.count, heads.count)
        self.scan = DeltaScan(build, prefix, heads, conv_runs)
        norm, output = (f"{prefix}.{name}" for name in spec.names)
        self.norm = GatedHeadNorm(build, norm, spec.value_dim, spec.eps, spec.gate)
        self.output = build.linear(output, values, spec.hidden_size, shard="row", reduce=spec.reduce)

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        projected, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        mixed, gate, beta, dt = projected.split(self.sizes, dim=-1)
        out = self.scan(mixed, beta, dt, step=step)
        return self.output(self.norm(out, gate)), residual


class DeltaScan(StateLayer):
    """The convolution, then the recurrence: (queries, keys and values [T, …], betas and steps [T, H]) → [T, H · V]."""

    def __init__(self, build: Build, prefix: str, heads: DeltaHeads, conv_runs: Sequence[Run]) -> None:
        spec = heads.spec
        conv = ChannelConv(build, spec.conv_width, conv_runs)
        kept = (heads.count, spec.key_dim, spec.value_dim), build.state_dtype
        shares = {"scan": [(heads.first, heads.count, spec.num_heads)], "conv": conv.shares}
        super().__init__(build, prefix, {"scan": kept, "conv": conv.window}, shares)
        self.spec, self.ops, self.conv, self.sizes = spec, build.ops, conv, heads.sizes
        self.make_decay(build, heads)

    def make_decay(self, build: Build, heads: DeltaHeads) -> None:
        """Makes the weights of `fade`."""
        shapes = dict.fromkeys(("A_log", "dt_bias"), (heads.spec.num_heads,))
        self.weights = FloatWeights(build, self.name, shapes, slice(heads.first, heads.first + heads.count))
        self.decay = empty_tensor(build, torch.float32, heads.count)

    def finish_load(self) -> None:
        """Called when the last weight has arrived."""
        self.decay.data.copy_(-self.weights["A_log"].exp())

    def fade(self, dt: Tensor) -> Tensor:
        """The logarithm of what each head keeps of its state, float32 [T, H], from steps in the same shape."""
        return self.decay * functional.softplus(dt.float() + self.weights["dt_bias"])

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        mixed, beta, dt = tensors
        mixed = self.ops.causal_conv(mixed, self.conv.taps, self.conv.bias, self.states["conv"], plan)
        query, key, value = mixed.split(self.sizes, dim=-1)
        query, key = (one.unflatten(-1, (-1, self.spec.key_dim)) for one in (query, key))
        decay = self.fade(dt)
        beta = beta.sigmoid() * 2 if self.spec.doubles else beta.sigmoid()
        value = value.unflatten(-1, (-1, self.spec.value_dim))
        return self.ops.gated_delta(query, key, value, decay, beta, self.states["scan"], plan).flatten(1)


class GatedHeadNorm(nn.Module):
    """RMS norm of each head of `dim` features, then times silu, or another function, of its gate."""

    def __init__(self, build: Build, prefix: str, dim: int, eps: float, gate: Gate) -> None:
        super().__init__()
        self.prefix, self.dim, self.eps, self.gate, self.ops = prefix, dim, eps, gate, build.ops
        self.weight = empty_parameter(build, dim)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [T, heads · dim] → the same."""
        normed = self.ops.rms_norm(x.unflatten(-1, (-1, self.dim)), self.weight, self.eps).flatten(-2)
        return (normed.float() * self.gate(gate.float())).to(x.dtype)

    def weight_slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", (self.dim,), self.weight)]
