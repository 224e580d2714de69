"""Routed experts held by this rank: whole ones where there is an expert group, else its part of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..interfaces.collectives import SingleGroup
from .linear import empty_parameter, split_evenly
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build

_ALL = slice(None)


class Experts(nn.Module):
    """Σ_k weight_k · down_e(silu(gate_e h) · up_e h) over the `top_k` experts that the router logits prefer.

    Read from "PREFIX.E.gate_proj.weight" and so on, or from the two tensors of all experts, "PREFIX.gate_up_proj"
    [E, 2 · intermediate, hidden] and "PREFIX.down_proj" [E, hidden, intermediate]. Without `reduces` the result is this
    rank's part of a sum over the tensor group.
    """

    reduces = True

    def __init__(
        self,
        build: Build,
        prefix: str,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        renormalize: bool,
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self.prefix, self.top_k, self.renormalize = prefix, top_k, renormalize
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.names, self.groups, self.ops = tuple(names), build.groups, build.ops
        spread = self.groups.expert.size > 1
        room = -(-num_experts // self.groups.expert.size)  # all ranks launch the same kernels
        self.first = self.groups.expert.rank * room
        self.count = max(0, min(room, num_experts - self.first))
        self.group = self.groups.expert if spread else self.groups.tensor
        self.divided = SingleGroup() if spread else self.groups.tensor
        self.width = split_evenly(f"the inner size of {prefix}", intermediate_size, self.divided)
        self.gate_up = empty_parameter(build, room, 2 * self.width, hidden_size)
        self.down = empty_parameter(build, room, hidden_size, self.width)

    def forward(self, hidden: Tensor, router_logits: Tensor) -> Tensor:
        """hidden [T, hidden_size], router_logits [T, num_experts] → [T, hidden_size], the same on every rank."""
        weights, ids = self.ops.route(router_logits, self.top_k, self.renormalize)
        local = ids - self.first if self.first else ids
        out = self.ops.fused_experts(hidden, self.gate_up, self.down, weights, local)
        return self.group.all_reduce(out) if self.reduces else out

    def weight_slots(self) -> list[WeightSlot]:
        slots: list[WeightSlot] = []
        gate, up, down = self.names
        start = self.divided.rank * self.width
        rows = slice(start, start + self.width)
        inner, outer = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        halves = (slice(0, self.width), slice(self.width, 2 * self.width))
        for expert in range(self.num_experts):
            name = f"{self.prefix}.{expert}"
            local = expert - self.first
            if not 0 <= local < self.count:  # another rank's
                slots += [WeightSlot(f"{name}.{part}.weight", (), None) for part in self.names]
                continue
            here = slice(local, local + 1)
            for part, half in zip((gate, up), halves, strict=True):
                slots.append(WeightSlot(f"{name}.{part}.weight", inner, self.gate_up, (rows, _ALL), (here, half)))
            slots.append(WeightSlot(f"{name}.{down}.weight", outer, self.down, (_ALL, rows), (here,)))
        return slots + self._fused_slots(rows, halves)

    def _fused_slots(self, rows: slice, halves: tuple[slice, slice]) -> list[WeightSlot]:
        gate, up, down = self.names
        experts, here = slice(self.first, self.first + self.count), slice(0, self.count)
        if not self.count:
            joined_name = f"{self.prefix}.{gate.removesuffix('_proj')}_{up}"
            return [WeightSlot(name, (), None) for name in (joined_name, f"{self.prefix}.{down}")]
        mine = range(experts.start, experts.stop)
        gate_up, joined = f"{self.prefix}.{gate.removesuffix('_proj')}_{up}", (2 * self.intermediate_size,)
        slots = [
            WeightSlot(
                gate_up,
                (self.num_experts, *joined, self.hidden_size),
                self.gate_up,
                (experts, slice(base + rows.start, base + rows.stop), _ALL),
                (here, half),
                covers=tuple(f"{self.prefix}.{expert}.{part}.weight" for expert in mine),
            )
            for part, base, half in zip((gate, up), (0, self.intermediate_size), halves, strict=True)
        ]
        shape = (self.num_experts, self.hidden_size, self.intermediate_size)
        covers = tuple(f"{self.prefix}.{expert}.{down}.weight" for expert in mine)
        taken = experts, _ALL, rows
        slots.append(WeightSlot(f"{self.prefix}.{down}", shape, self.down, taken, (here,), covers=covers))
        return slots
