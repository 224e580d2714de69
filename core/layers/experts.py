"""Routed experts held by this rank: whole ones where there is an expert group, else its part of each.

Knows neither who chose the experts nor how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..interfaces.collectives import SingleGroup
from ..interfaces.experts import Dispatched, ExpertExchange, ExpertMethod, ExpertSpec, LocalExchange, Routing
from ..ops.layers import RowParts
from .expert_map import ExpertMap
from .linear import MethodLayer, split_evenly
from .weights import WeightSlot

if TYPE_CHECKING:
    from .build import Build

_ALL = slice(None)


class Experts(MethodLayer):
    """Σ_k weight_k · expert_k(h), and `shared`(h) where there is one, over the experts that a router chose.

    Experts are spread over the ranks of the expert group in equal runs; without one each tensor rank holds `width` of
    the inner size of all experts. Where they are balanced, `map` says which slots hold them; slot s begins with expert
    s modulo their number. `shared` gives a rank's part of a sum over the tensor group. Without `reduces` so
    does this layer.
    """

    reduces = True
    gate_up: nn.Parameter  # from `PlainExperts`
    down: nn.Parameter

    def __init__(self, build: Build, prefix: str, spec: ExpertSpec, shared: nn.Module | None = None) -> None:
        super().__init__(build)
        self.prefix, self.spec, self.shared = prefix, spec, shared
        group = build.groups.expert
        self.map: ExpertMap | None = None
        self.balanced = build.redundant_experts is not None
        self.num_all_slots = spec.num_experts + (build.redundant_experts or 0)
        self.num_slots = -(-self.num_all_slots // group.size)  # all ranks launch the same kernels
        self.first = group.rank * self.num_slots
        self.count = max(0, min(self.num_slots, self.num_all_slots - self.first))
        if self.balanced and self.num_all_slots % group.size:
            raise ValueError(f"{prefix}: {self.num_all_slots} slots of experts do not divide over {group.size} ranks")
        self.group = build.groups.tensor
        self.divided = SingleGroup() if group.size > 1 else self.group
        self.width = split_evenly(f"the inner size of {prefix}", spec.intermediate_size, self.divided)
        self.method: ExpertMethod = build.methods.experts(prefix, spec) or PlainExperts()
        #: whether every rank has all tokens, so that nothing moves
        self.local = build.exchange is None or build.device.type == "meta"
        #: the number of this rank's first slot in what `method` is given
        self.base = self.first if self.local and self.method.takes_all_slots else 0
        self.exchange: ExpertExchange = LocalExchange(self.first - self.base)
        if build.exchange is not None and not self.local:
            self.exchange = build.exchange(spec, self.num_slots)
        self.running = build.running
        self._none = torch.empty(0, spec.hidden_size, dtype=build.dtype, device=build.device)
        given: str = self.exchange.layout
        takes: list[str] = list(self.method.layouts)
        if given not in takes:
            names = type(self.exchange).__name__, type(self.method).__name__
            raise ValueError(f"{prefix}: {names[0]} hands over {given}, and {names[1]} takes {', '.join(takes)}")
        self.method.create(self)

    @property
    def held(self) -> list[int]:
        """The expert in each of this rank's slots, from the first; without balancing the last slots may have none."""
        last = self.first + self.count
        if self.map is not None:
            experts: list[int] = self.map.expert_of[self.first : last].tolist()
            return experts
        return [slot % self.spec.num_experts for slot in range(self.first, last)]

    def forward(self, hidden: Tensor, routing: Routing) -> Tensor:
        """hidden [T, H] → [T, H], the same on every rank of the tensor group."""
        if self.map is not None:
            routing = self._placed(routing, self.map)
        sent = self.exchange.dispatch(self.method.prepare(hidden), routing, self.running.step)
        shared = self.shared(hidden) if self.shared is not None else None
        out = self.exchange.combine(self.method.apply(self, sent), sent)
        out = out if shared is None else out + shared
        return self.group.all_reduce(out) if self.reduces else out

    def parts(self, values: Tensor) -> list[slice]:
        """The tokens whose results may begin to be summed over ranks while those of others are computed."""
        if not self.local or self.shared is not None or self.reduces or self.group.size == 1 or self.ops.invariant:
            return []
        return self.group.parts_of(len(values), self.spec.hidden_size * values.dtype.itemsize)

    def _placed(self, routing: Routing, places: ExpertMap) -> Routing:
        """The slots of the experts that were chosen; tokens that are no padding are counted."""
        step = self.running.step
        mapping = step.batches[0].slot_mapping if step is not None and step.batches else None
        if mapping is not None and len(mapping) != len(routing.ids):  # of layers that keep nothing
            mapping = None
        given = places.slots_of, places.num_replicas, places.loads
        return Routing(routing.weights, self.ops.place_experts(routing.ids, *given, mapping))

    def serve(self) -> None:
        """Computes for the tokens of other ranks alone: what a rank without requests calls instead of `forward`."""
        weights = self._none.new_empty(0, self.spec.top_k, dtype=torch.float32)
        routing = Routing(weights, weights.to(torch.int32))
        sent = self.exchange.dispatch(self.method.prepare(self._none), routing, self.running.step)
        self.exchange.combine(self.method.apply(self, sent), sent)

    def weight_slots(self) -> list[WeightSlot]:
        return self.method.weight_slots(self)


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
    takes_all_slots = True

    def create(self, layer: Experts) -> None:
        spec = layer.spec
        if spec.weights_on_input and layer.exchange.layout == "slots":
            raise ValueError(
                f"{layer.prefix}: {type(layer.exchange).__name__} weighs what experts give, not their input"
            )
        if spec.activation != "silu":
            raise ValueError(f"{layer.prefix}: experts are gated by 'silu', not by {spec.activation!r}")
        if spec.bias:
            raise ValueError(f"{layer.prefix}: experts with biases cannot be computed yet")
        layer.gate_up = layer.empty(layer.num_slots, 2 * layer.width, spec.hidden_size)
        layer.down = layer.empty(layer.num_slots, spec.hidden_size, layer.width)

    def weight_slots(self, layer: Experts) -> list[WeightSlot]:
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
            of_all = layer.num_all_slots
            begun = layer.parts(values)
            parts = RowParts(begun, layer.group.begin_all_reduce) if begun else None
            return layer.ops.fused_experts(
                values, layer.gate_up, layer.down, weights, slots, of_all=of_all, first=layer.base, parts=parts
            )
        scaled = (values[:, None] * weights[..., None]).to(values.dtype)  # [N, k, H]
        ones, each = weights.new_ones(weights.numel(), 1), slots.reshape(-1, 1)
        rows, of_all = scaled.flatten(0, 1), layer.num_all_slots
        out = layer.ops.fused_experts(rows, layer.gate_up, layer.down, ones, each, of_all=of_all, first=layer.base)
        return out.view(scaled.shape).sum(1)


def _rows_of(layer: Experts) -> tuple[slice, tuple[slice, slice]]:
    """The rows of gate and of up that this rank holds, and where they lie in `gate_up`."""
    start, width = layer.divided.rank * layer.width, layer.width
    return slice(start, start + width), (slice(0, width), slice(width, 2 * width))


def _slots_apart(layer: Experts) -> list[WeightSlot]:
    """Three tensors for each expert."""
    slots: list[WeightSlot] = []
    spec, (rows, halves), held = layer.spec, _rows_of(layer), layer.held
    gate, up, down = spec.names
    inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
    for expert in sorted(set(range(spec.num_experts)).difference(held)):  # another rank's
        slots += [WeightSlot(f"{layer.prefix}.{expert}.{part}.weight", (), None) for part in spec.names]
    for local, expert in enumerate(held):
        name, here = f"{layer.prefix}.{expert}", slice(local, local + 1)
        for part, half in zip((gate, up), halves, strict=True):
            slots.append(WeightSlot(f"{name}.{part}.weight", inner, layer.gate_up, (rows, _ALL), (here, half)))
        slots.append(WeightSlot(f"{name}.{down}.weight", outer, layer.down, (_ALL, rows), (here,)))
    return slots


def _slots_fused(layer: Experts) -> list[WeightSlot]:
    """Two tensors for all experts, of which each run of neighbouring experts is read at once."""
    spec, (rows, halves), held = layer.spec, _rows_of(layer), layer.held
    gate, up, down = spec.names
    gate_up, of_down = f"{layer.prefix}.{gate.removesuffix('_proj')}_{up}", f"{layer.prefix}.{down}"
    if not held:
        return [WeightSlot(name, (), None) for name in (gate_up, of_down)]
    joined = (spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size)
    shape = (spec.num_experts, spec.hidden_size, spec.intermediate_size)
    slots: list[WeightSlot] = []
    for here, experts in _runs(held):
        for part, base, half in zip((gate, up), (0, spec.intermediate_size), halves, strict=True):
            piece = (experts, slice(base + rows.start, base + rows.stop), _ALL)
            covers = _covered(layer, held, part)
            slots.append(WeightSlot(gate_up, joined, layer.gate_up, piece, (here, half), covers=covers))
        covers = _covered(layer, held, down)
        slots.append(WeightSlot(of_down, shape, layer.down, (experts, _ALL, rows), (here,), covers=covers))
    return slots


def _runs(held: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(local slots, experts) of runs in which both follow one another."""
    start = 0
    for end in range(1, len(held) + 1):
        if end == len(held) or held[end] != held[end - 1] + 1:
            yield slice(start, end), slice(held[start], held[end - 1] + 1)
            start = end


def _covered(layer: Experts, held: Sequence[int], part: str) -> tuple[str, ...]:
    """The tensors of this rank's experts for which a fused one stands."""
    return tuple(f"{layer.prefix}.{expert}.{part}.weight" for expert in held)
