"""Routed experts held by this rank: whole ones where there is an expert group, else its part of each.

Knows neither who chose the experts nor how they are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..interfaces.collectives import SingleGroup
from ..interfaces.experts import Dispatched, ExpertExchange, ExpertMethod, ExpertSpec, LocalExchange, Routing
from .linear import empty_parameter, split_evenly
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build

_ALL = slice(None)


class Experts(nn.Module):
    """Σ_k weight_k · expert_k(h), and `shared`(h) where there is one, over the experts that a router chose.

    Experts are spread over the ranks of the expert group in equal runs; without one each tensor rank holds `width` of
    the inner size of all experts. `shared` gives a rank's part of a sum over the tensor group. Without `reduces` so
    does this layer.
    """

    reduces = True
    gate_up: nn.Parameter  # from `PlainExperts`
    down: nn.Parameter

    def __init__(self, build: Build, prefix: str, spec: ExpertSpec, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.prefix, self.spec, self.shared, self.ops = prefix, spec, shared, build.ops
        group = build.groups.expert
        self.num_slots = -(-spec.num_experts // group.size)  # all ranks launch the same kernels
        self.first = group.rank * self.num_slots
        self.count = max(0, min(self.num_slots, spec.num_experts - self.first))
        self.group = build.groups.tensor
        self.divided = SingleGroup() if group.size > 1 else self.group
        self.width = split_evenly(f"the inner size of {prefix}", spec.intermediate_size, self.divided)
        self.exchange: ExpertExchange = LocalExchange(self.first)
        if build.exchange is not None and build.device.type != "meta":
            self.exchange = build.exchange(spec, self.num_slots)
        self.running = build.running
        self._none = torch.empty(0, spec.hidden_size, dtype=build.dtype, device=build.device)
        self.method: ExpertMethod = PlainExperts(build)
        given: str = self.exchange.layout
        takes: list[str] = list(self.method.layouts)
        if given not in takes:
            names = type(self.exchange).__name__, type(self.method).__name__
            raise ValueError(f"{prefix}: {names[0]} hands over {given}, and {names[1]} takes {', '.join(takes)}")
        self._slots = self.method.create(self)

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [T, H] → [T, H], the same on every rank of the tensor group."""
        sent = self.exchange.dispatch(self.method.prepare(hidden), routing, self.running.step)
        shared = self.shared(hidden) if self.shared is not None else None
        out = self.exchange.combine(self.method.apply(self, sent), sent)
        out = out if shared is None else out + shared
        return self.group.all_reduce(out) if self.reduces else out

    def serve(self) -> None:
        """Computes for the tokens of other ranks alone: what a rank without requests calls instead of `forward`."""
        weights = self._none.new_empty(0, self.spec.top_k, dtype=torch.float32)
        routing = Routing(weights, weights.to(torch.int32))
        sent = self.exchange.dispatch(self.method.prepare(self._none), routing, self.running.step)
        self.exchange.combine(self.method.apply(self, sent), sent)

    def weight_slots(self) -> list[WeightSlot]:
        return self._slots

    def finish_load(self) -> None:
        """Called when the last weight has arrived."""
        self.method.finish_load(self)


def experts_of(model: nn.Module) -> list[Experts]:
    """The layers of experts in the order in which they were made."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def exchanges_of(model: nn.Module) -> list[ExpertExchange]:
    """The exchanges of a model's layers of experts, each once."""
    return list(dict.fromkeys(layer.exchange for layer in experts_of(model)))


class PlainExperts(ExpertMethod):
    """Weights in the type of the activations: `gate_up` [slots, 2 · width, H] and `down` [slots, H, width].

    Read from "PREFIX.E.gate_proj.weight" and so on, or from the two tensors of all experts, "PREFIX.gate_up_proj"
    [E, 2 · intermediate, H] and "PREFIX.down_proj" [E, H, intermediate].
    """

    layouts = ("tokens", "slots")

    def __init__(self, build: Build) -> None:
        self._build = build

    def create(self, layer: Experts) -> list[WeightSlot]:
        spec = layer.spec
        if spec.weights_on_input and layer.exchange.layout == "slots":
            raise ValueError(
                f"{layer.prefix}: {type(layer.exchange).__name__} weighs what experts give, not their input"
            )
        if spec.activation != "silu":
            raise ValueError(f"{layer.prefix}: experts are gated by 'silu', not by {spec.activation!r}")
        if spec.bias:
            raise ValueError(f"{layer.prefix}: experts with biases cannot be computed yet")
        layer.gate_up = empty_parameter(self._build, layer.num_slots, 2 * layer.width, spec.hidden_size)
        layer.down = empty_parameter(self._build, layer.num_slots, spec.hidden_size, layer.width)
        return _slots_apart(layer) + _slots_fused(layer)

    def rows(self, layer: Experts) -> list[Tensor]:
        return [layer.gate_up, layer.down]

    def apply(self, layer: Experts, dispatched: Dispatched) -> Tensor:
        values, weights, slots = dispatched.values, dispatched.weights, dispatched.slots
        if dispatched.counts is not None:  # rows beyond the counts are computed, and nobody reads them
            halves = torch.bmm(values, layer.gate_up.transpose(1, 2))
            inner = layer.ops.silu_mul(halves.flatten(0, 1)).view(*halves.shape[:2], -1)
            return torch.bmm(inner, layer.down.transpose(1, 2))
        if weights is None or slots is None:
            raise ValueError(f"{layer.prefix}: an exchange gave no slots to experts that take tokens with slots")
        if not layer.spec.weights_on_input:
            of_all = layer.spec.num_experts
            return layer.ops.fused_experts(values, layer.gate_up, layer.down, weights, slots, of_all=of_all)
        scaled = (values[:, None] * weights[..., None]).to(values.dtype)  # [N, k, H]
        ones, each = weights.new_ones(weights.numel(), 1), slots.reshape(-1, 1)
        rows, of_all = scaled.flatten(0, 1), layer.spec.num_experts
        out = layer.ops.fused_experts(rows, layer.gate_up, layer.down, ones, each, of_all=of_all)
        return out.view(scaled.shape).sum(1)


def _rows_of(layer: Experts) -> tuple[slice, tuple[slice, slice]]:
    """The rows of gate and of up that this rank holds, and where they lie in `gate_up`."""
    start, width = layer.divided.rank * layer.width, layer.width
    return slice(start, start + width), (slice(0, width), slice(width, 2 * width))


def _slots_apart(layer: Experts) -> list[WeightSlot]:
    """Three tensors for each expert."""
    slots: list[WeightSlot] = []
    spec, (rows, halves) = layer.spec, _rows_of(layer)
    gate, up, down = spec.names
    inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
    for expert in range(spec.num_experts):
        name, local = f"{layer.prefix}.{expert}", expert - layer.first
        if not 0 <= local < layer.count:  # another rank's
            slots += [WeightSlot(f"{name}.{part}.weight", (), None) for part in spec.names]
            continue
        here = slice(local, local + 1)
        for part, half in zip((gate, up), halves, strict=True):
            slots.append(WeightSlot(f"{name}.{part}.weight", inner, layer.gate_up, (rows, _ALL), (here, half)))
        slots.append(WeightSlot(f"{name}.{down}.weight", outer, layer.down, (_ALL, rows), (here,)))
    return slots


def _slots_fused(layer: Experts) -> list[WeightSlot]:
    """Two tensors for all experts."""
    spec, (rows, halves) = layer.spec, _rows_of(layer)
    gate, up, down = spec.names
    gate_up = f"{layer.prefix}.{gate.removesuffix('_proj')}_{up}"
    if not layer.count:
        return [WeightSlot(name, (), None) for name in (gate_up, f"{layer.prefix}.{down}")]
    experts, here = slice(layer.first, layer.first + layer.count), slice(0, layer.count)
    joined = (spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size)
    slots = [
        WeightSlot(
            gate_up,
            joined,
            layer.gate_up,
            (experts, slice(base + rows.start, base + rows.stop), _ALL),
            (here, half),
            covers=_covered(layer, part),
        )
        for part, base, half in zip((gate, up), (0, spec.intermediate_size), halves, strict=True)
    ]
    shape = (spec.num_experts, spec.hidden_size, spec.intermediate_size)
    covers = _covered(layer, down)
    slots.append(WeightSlot(f"{layer.prefix}.{down}", shape, layer.down, (experts, _ALL, rows), (here,), covers=covers))
    return slots


def _covered(layer: Experts, part: str) -> tuple[str, ...]:
    """The tensors of this rank's experts for which a fused one stands."""
    return tuple(f"{layer.prefix}.{expert}.{part}.weight" for expert in range(layer.first, layer.first + layer.count))
