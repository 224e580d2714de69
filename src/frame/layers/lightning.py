"""Lightning attention (MiniMax-01): linear attention whose state fades at a fixed rate for each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from frame.core.layers.linear import Linear, Rows, split_evenly
from frame.core.ops.states import ScanWeights

from .heads_norm import HeadsNorm
from .normed import normed_linear
from .states import Share, StateLayer, empty_tensor

if TYPE_CHECKING:
    from frame.core.interfaces.model import ForwardStep
    from frame.core.layers.build import Build


class LightningAttention(nn.Module):
    """Maps [T, hidden_size] to a rank's part of the mixed sum. Heads are divided over the tensor group.

    "PREFIX.qkv_proj" holds for each head its query, key and value, which go through silu; "PREFIX.output_gate" the
    gates of the normalised output. Layer `index` of `num_layers` fades by exp(-slope), with slopes as in ALiBi that
    fall from layer to layer.
    """

    def __init__(self, build: Build, prefix: str, heads: tuple[int, int], index: int, num_layers: int) -> None:
        super().__init__()
        num_heads, size = heads
        tensor, hidden_size = build.groups.tensor, build.config.hidden_size
        count = split_evenly(f"the heads of {prefix}", num_heads, tensor)
        mine = range(tensor.rank * count, (tensor.rank + 1) * count)
        rows = [
            Rows(f"{prefix}.qkv_proj", 3 * num_heads * size, (3 * head + part) * size, size)
            for part in range(3)
            for head in mine
        ]
        rows.append(Rows(f"{prefix}.output_gate", num_heads * size, mine.start * size, count * size))
        self.inputs = Linear(build, rows, hidden_size, slice(0, hidden_size))
        self.sizes = (3 * count * size, count * size)
        factor = 1 - index / (num_layers - 1 + 1e-5) + 1e-5
        slopes = [factor * 2.0 ** (-8 * (head + 1) / num_heads) for head in mine]
        self.scan = LightningScan(build, prefix, slopes, size, (mine.start, count, num_heads))
        self.norm = HeadsNorm(build, f"{prefix}.norm", num_heads, size, eps=1e-6)  # the eps is not in configurations
        self.output = build.linear(f"{prefix}.out_proj", num_heads * size, hidden_size, shard="row")

    def forward(
        self, norm: nn.Module, hidden: Tensor, residual: Tensor | None, positions: Tensor, step: ForwardStep
    ) -> tuple[Tensor, Tensor]:
        """(the mixed norm(hidden + residual), hidden + residual); all [T, hidden_size]."""
        del positions
        joined, _, residual = normed_linear(norm, self.inputs, hidden, residual)
        mixed, gate = joined.split(self.sizes, dim=-1)
        out = self.norm(self.scan(functional.silu(mixed), step=step)).flatten(1)
        return self.output(gate.sigmoid() * out), residual


class LightningScan(StateLayer):
    """S ← exp(-slope) S + v kᵀ, o = S q: (queries, then keys, then values [T, 3 · H · D]) → [T, H, D]."""

    def __init__(self, build: Build, prefix: str, slopes: list[float], size: int, share: Share) -> None:
        super().__init__(build, prefix, {"scan": ((len(slopes), size, size), build.state_dtype)}, {"scan": [share]})
        self.ops, self.heads, self.slopes = build.ops, (3, len(slopes), size), slopes
        self.decay = empty_tensor(build, torch.float32, len(slopes))

    def finish_load(self) -> None:
        """Called when the last weight has arrived."""
        self.decay.data.copy_(-torch.tensor(self.slopes))

    def compute(self, plan: Any, *tensors: Tensor) -> Tensor:
        query, key, value = tensors[0].unflatten(-1, self.heads).unbind(1)
        steps = torch.ones_like(value[..., 0])
        return self.ops.ssd_scan(value, steps, key, query, ScanWeights(self.decay), self.states["scan"], plan)
