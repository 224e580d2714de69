"""Kimi's delta attention: a gated delta net whose state fades by each feature of the key, with low-rank gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.core.layers.linear import Linear, Rows
from frame.core.layers.weights import WeightSlot

from .delta_net import DeltaHeads, DeltaScan, GatedHeadNorm
from .normed import normed_linear
from .states import FloatWeights, empty_tensor

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build


class KimiDeltaAttention(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum. Heads are divided over the tensor group.

    Under PREFIX are "q_proj", "k_proj", "v_proj" and "b_proj", the two products of the fading, "f_a_proj" and
    "f_b_proj", and of the output's gate, "g_a_proj" and "g_b_proj". Keys and values have heads of one size.
    """

    def __init__(self, build: Build, prefix: str, heads: DeltaHeads) -> None:
        super().__init__()
        spec, size = heads.spec, heads.spec.key_dim
        runs = heads.by_kind([f"{prefix}.{part}_proj" for part in "qkv"] + ["", ""], joined=False)[:3]
        runs += [(f"{prefix}.b_proj", spec.num_heads, heads.first, heads.count)]
        runs += [(f"{prefix}.{part}_a_proj", size, 0, size) for part in "fg"]
        self.inputs = Linear(build, [Rows(*run) for run in runs], spec.hidden_size, slice(0, spec.hidden_size))
        self.sizes = (sum(heads.sizes), heads.count, size, size)
        whole = spec.num_heads * size
        self.fade = build.linear(f"{prefix}.f_b_proj", size, whole, shard="column")
        self.gate = build.linear(f"{prefix}.g_b_proj", size, whole, shard="column")
        conv_runs = heads.by_kind([f"{prefix}.{part}_conv1d" for part in "qkv"] + ["", ""], joined=False)[:3]
        self.scan = FeatureDeltaScan(build, prefix, heads, conv_runs)
        self.norm = GatedHeadNorm(build, f"{prefix}.o_norm", size, spec.eps, torch.sigmoid)
        self.output = build.linear(f"{prefix}.o_proj", whole, spec.hidden_size, shard="row", reduce=False)

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(its part of norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        projected, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        mixed, beta, fade, gate = projected.split(self.sizes, dim=-1)
        out = self.scan(mixed, beta, self.fade(fade), step=step)
        return self.output(self.norm(out, self.gate(gate))), residual


class FeatureDeltaScan(DeltaScan):
    """As `DeltaScan`, with steps [T, H · K] for each feature of the keys."""

    def make_decay(self, build: Build, heads: DeltaHeads) -> None:
        size, count = heads.spec.key_dim, heads.count
        mine = slice(heads.first * size, (heads.first + count) * size)
        self.weights = FloatWeights(build, self.name, {"dt_bias": (heads.spec.num_heads * size,)}, mine)
        self.log_decay = empty_tensor(build, torch.float32, 1, 1, count, 1)
        self.decay = empty_tensor(build, torch.float32, count, 1)
        self.heads = heads

    def finish_load(self) -> None:
        self.decay.data.copy_(-self.log_decay[0, 0].exp())

    def fade(self, dt: Tensor) -> Tensor:
        """float32 [T, H, K] of steps [T, H · K]."""
        steps = functional.softplus(dt.float() + self.weights["dt_bias"])
        out: Tensor = self.decay * steps.unflatten(-1, (self.heads.count, -1))
        return out

    def weight_slots(self) -> list[WeightSlot]:
        first, count, every = self.heads.first, self.heads.count, slice(None)
        shape, index = (1, 1, self.heads.spec.num_heads, 1), (every, every, slice(first, first + count), every)
        return [WeightSlot(f"{self.name}.A_log", shape, self.log_decay, index)]
