"""Routed experts held by this rank: whole ones where there is an expert group, else its part of each.

Knows neither who chose the experts nor how they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..interfaces.collectives import SingleGroup
from ..interfaces.experts import SILU, Dispatched, ExpertExchange, ExpertMethod, ExpertSpec, LocalExchange, Routing
from ..ops.layers import RowParts, gated
from .expert_map import ExpertMap
from .linear import MethodLayer, RowLinear, split_evenly
from .weight_slot import Index, WeightSlot

if TYPE_CHECKING:
    from ..interfaces.experts import ExpertMatrices
    from .build import Build

_ALL = slice(None)


class Experts(MethodLayer):
    """Σ_k weight_k · expert_k(h), and `shared`(h) where there is one, over the experts that a router chose.

    Experts are spread over the ranks of the expert group in equal runs; without one each tensor rank holds `width` of
    the inner size of all experts. Where they are balanced, `map` says which slots hold them; slot s begins with expert
    s modulo their number. `shared` gives a rank's part of a sum over the tensor group. Without `reduces` so
    does this layer, and `begins` is as for `RowLinear`.
    """

    reduces = True
    begins = True
    gate_up: nn.Parameter  # from `PlainExperts`
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

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
        method = build.methods.experts(prefix, spec) or PlainExperts()
        self.method: ExpertMethod = build.methods.adapters.experts(prefix, spec, method)
        #: whether every rank has all tokens, so that nothing moves
        self.local = build.exchange is None or build.device.type == "meta"
        #: the number of this rank's first slot in what `method` is given
        self.base = self.first if self.local and self.method.takes_all_slots else 0
        self.exchange: ExpertExchange = LocalExchange(self.first - self.base)
        if build.exchange is not None and not self.local:
            self.exchange = build.exchange(spec, self.num_slots)
        for module in () if shared is None else shared.modules():
            if isinstance(module, RowLinear):
                module.begins = False
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
        if not self.begins:
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

    Without a gate the first is [slots, width, H]. Biases `gate_up_bias` [slots, 2 · width] and `down_bias` [slots, H]
    are None where there are none; of ranks that divide each expert, the first one adds the second.
    """

    layouts = ("tokens", "slots")
    takes_all_slots = True

    def create(self, layer: Experts) -> None:
        spec = layer.spec
        if spec.weights_on_input and layer.exchange.layout == "slots":
            raise ValueError(
                f"{layer.prefix}: {type(layer.exchange).__name__} weighs what experts give, not their input"
            )
        inner = layer.width * (len(spec.names) - 1)
        layer.gate_up = layer.empty(layer.num_slots, inner, spec.hidden_size)
        layer.down = layer.empty(layer.num_slots, spec.hidden_size, layer.width)
        first = layer.divided.rank == 0
        layer.gate_up_bias = layer.empty(layer.num_slots, inner) if spec.bias else None
        layer.down_bias = layer.empty(layer.num_slots, spec.hidden_size) if spec.bias and first else None

    def weight_slots(self, layer: Experts) -> list[WeightSlot]:
        return _slots_apart(layer) + _slots_joined(layer)

    def rows(self, layer: Experts) -> list[Tensor]:
        found = layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias
        return [tensor for tensor in found if tensor is not None]

    def matrices(self, layer: Experts, dtype: torch.dtype) -> ExpertMatrices | None:
        return (layer.gate_up, layer.down), (layer.gate_up_bias, layer.down_bias)

    def apply(self, layer: Experts, dispatched: Dispatched) -> Tensor:
        values, weights, slots = dispatched.values, dispatched.weights, dispatched.slots
        if dispatched.counts is not None:
            return _by_slot(layer, values)
        if weights is None or slots is None:
            raise ValueError(f"{layer.prefix}: an exchange gave no slots to experts that take tokens with slots")
        how: dict[str, Any] = {"of_all": layer.num_all_slots, "first": layer.base, "gating": layer.spec.gating}
        how["biases"] = layer.gate_up_bias, layer.down_bias
        if not layer.spec.weights_on_input:
            begun = layer.parts(values)
            parts = RowParts(begun, layer.group.begin_all_reduce) if begun else None
            return self.multiply(layer, values, weights, slots, parts=parts, **how)
        scaled = (values[:, None] * weights[..., None]).to(values.dtype)  # [N, k, H]
        ones, each = weights.new_ones(weights.numel(), 1), slots.reshape(-1, 1)
        out = self.multiply(layer, scaled.flatten(0, 1), ones, each, **how)
        return out.view(scaled.shape).sum(1)

    def multiply(self, layer: Experts, values: Tensor, weights: Tensor, slots: Tensor, **how: Any) -> Tensor:
        """`Ops.fused_experts` of the layer's matrices: what experts with other weights replace."""
        return layer.ops.fused_experts(values, layer.gate_up, layer.down, weights, slots, **how)


def _by_slot(layer: Experts, values: Tensor) -> Tensor:
    """[slots, capacity, H] of values in that shape; rows beyond the counts are computed, and nobody reads them."""
    inner = torch.bmm(values, layer.gate_up.transpose(1, 2))
    inner = inner if layer.gate_up_bias is None else inner + layer.gate_up_bias[:, None]
    how, ops = layer.spec.gating, layer.ops
    flat = inner.flatten(0, 1)
    active = ops.silu_mul(flat) if how == SILU else ops.map_rows(partial(gated, how=how), flat)
    out = torch.bmm(active.view(*inner.shape[:2], -1), layer.down.transpose(1, 2))
    return out if layer.down_bias is None else out + layer.down_bias[:, None]


def _pieces(layer: Experts) -> tuple[slice, list[slice]]:
    """The rows of gate, and so of up, that this rank holds, and where those of each lie in `gate_up`."""
    start, width = layer.divided.rank * layer.width, layer.width
    return slice(start, start + width), [slice(i * width, (i + 1) * width) for i in range(len(layer.spec.names) - 1)]


def _slots_apart(layer: Experts) -> list[WeightSlot]:
    """The tensors of each expert."""
    slots: list[WeightSlot] = []
    spec, (rows, pieces), held = layer.spec, _pieces(layer), layer.held
    *first, down = spec.names
    inner, outer = (spec.intermediate_size, spec.hidden_size), (spec.hidden_size, spec.intermediate_size)
    kinds = ("weight", "bias") if spec.bias else ("weight",)
    for expert in sorted(set(range(spec.num_experts)).difference(held)):  # another rank's
        slots += [WeightSlot(name, (), None) for name in _names(layer, expert, *spec.names, kinds=kinds)]
    for local, expert in enumerate(held):
        name, here = f"{layer.prefix}.{expert}", slice(local, local + 1)
        for part, piece in zip(first, pieces, strict=True):
            slots.append(WeightSlot(f"{name}.{part}.weight", inner, layer.gate_up, (rows, _ALL), (here, piece)))
            if spec.bias:
                slots.append(WeightSlot(f"{name}.{part}.bias", inner[:1], layer.gate_up_bias, (rows,), (here, piece)))
        slots.append(WeightSlot(f"{name}.{down}.weight", outer, layer.down, (_ALL, rows), (here,)))
        if spec.bias:
            slots.append(WeightSlot(f"{name}.{down}.bias", outer[:1], layer.down_bias, (), (here,)))
    return slots


def _slots_joined(layer: Experts) -> list[WeightSlot]:
    """Two tensors for all experts, of which each run of neighbouring experts is read at once; their biases."""
    spec, (rows, pieces), held = layer.spec, _pieces(layer), layer.held
    *first, down = spec.names
    count, width, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
    names = spec.joined or ("_".join([*(part.removesuffix("_proj") for part in first[:-1]), first[-1]]), down)
    of_inner, of_down = (f"{layer.prefix}.{name}" for name in names)
    sizes = (len(first) * width, hidden), (hidden, width)
    if not held:
        suffixes = ("", "_bias") if spec.bias else ("",)
        return [WeightSlot(name + suffix, (), None) for name in (of_inner, of_down) for suffix in suffixes]
    slots: list[WeightSlot] = []

    def add(name: str, shape: tuple[int, ...], target: Tensor | None, index: Index, region: Index, covers: str) -> None:
        part, kind = covers.split(".")
        covered = tuple(one for expert in held for one in _names(layer, expert, part, kinds=(kind,)))
        ways = (spec.transposed, not spec.transposed) if kind == "weight" else (False,)
        for turned in ways:  # weights in whichever order of axes the file has them
            slot = WeightSlot(name, shape, target, index, region, covers=covered)
            if turned:
                order = (shape[0], shape[2], shape[1]), (index[0], index[2], index[1])
                slot = replace(slot, shape=order[0], index=order[1], transposed=True)
            if turned != ways[0] and shape[1] == shape[2]:  # only the shape of the other tensor tells
                other, (outputs, inputs) = (of_down, sizes[1]) if name == of_inner else (of_inner, sizes[0])
                if outputs == inputs:
                    break
                slot = replace(slot, beside=(other, (count, *((inputs, outputs) if turned else (outputs, inputs)))))
            slots.append(slot)

    for here, experts in _runs(held):
        for number, (part, piece) in enumerate(zip(first, pieces, strict=True)):
            lines = slice(number * width + rows.start, number * width + rows.stop)
            if spec.interleaved:
                step = len(first)
                lines = slice(rows.start * step + number, (rows.stop - 1) * step + number + 1, step)
            shape, region = (count, len(first) * width), (here, piece)
            add(of_inner, (count, *sizes[0]), layer.gate_up, (experts, lines, _ALL), region, f"{part}.weight")
            if spec.bias:
                add(f"{of_inner}_bias", shape, layer.gate_up_bias, (experts, lines), region, f"{part}.bias")
        add(of_down, (count, *sizes[1]), layer.down, (experts, _ALL, rows), (here,), f"{down}.weight")
        if spec.bias:
            add(f"{of_down}_bias", (count, hidden), layer.down_bias, (experts,), (here,), f"{down}.bias")
    return slots


def _names(layer: Experts, expert: int, *parts: str, kinds: Sequence[str]) -> list[str]:
    """The tensors of an expert's parts."""
    return [f"{layer.prefix}.{expert}.{part}.{kind}" for part in parts for kind in kinds]


def _runs(held: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(local slots, experts) of runs in which both follow one another."""
    start = 0
    for end in range(1, len(held) + 1):
        if end == len(held) or held[end] != held[end - 1] + 1:
            yield slice(start, end), slice(held[start], held[end - 1] + 1)
            start = end
