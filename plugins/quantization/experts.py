"""Routed experts whose weights are codes times scales, by which `Ops.coded_experts` multiplies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frame.interfaces import Dispatched, ExpertMatrices, LinearSpec
from frame.layers import PlainExperts, Rows, WeightSlot
from frame.ops import CodedWeights, quantize_rows

from .packed import SCALES, round_groups
from .packing import pack_nibbles
from .scaled import CODES, WEIGHTS, runs_of_rows, with_exponents

PARTS = ("gate_up", "down")


class Shown:
    """A layer of experts with other weights, or other attributes."""

    def __init__(self, layer: Any, **weights: Any) -> None:
        self._layer = layer
        self.__dict__.update(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class CodedExperts(PlainExperts):
    """`gate_up`, `down` are codes [slots, N, K] of `dtype`, or nibbles int32 [slots, N, K / 8] where that is None.

    `gate_up_scales`, `down_scales` are [slots, ⌈N / r⌉, ⌈K / c⌉] for blocks of (r, c), 0 for all rows or columns;
    those of nibbles are [slots, N, K / c]. Where it `rounds`, a platform may round what the products are given as well.
    """

    def __init__(self, dtype: torch.dtype | None, block: tuple[int, int] = (1, 0), *, rounds: bool = False) -> None:
        self._dtype, self._block, self.rounds = dtype, block, rounds
        self.blocks: dict[str, tuple[int, int]] = {}

    def create(self, layer: Any) -> None:
        device, layer.device = layer.device, torch.device("meta")
        try:
            super().create(layer)  # which checks the layer, and says what parts it has
        finally:
            layer.device = device
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if name not in PARTS:
                setattr(layer, name, layer.empty(*parameter.shape, dtype=parameter.dtype))
                continue
            self.allocate(layer, name, *parameter.shape)

    def allocate(self, layer: Any, name: str, slots: int, rows: int, columns: int) -> None:
        """Gives `layer` the codes and scales of "gate_up" or "down" [slots, rows, columns]."""
        self.blocks[name] = r, c = self._block_for(layer, name, rows, columns)
        if self._dtype is None:
            codes = layer.empty(slots, rows, columns // 8, dtype=torch.int32)
            scales = layer.empty(slots, rows, columns // c)
        else:
            codes = layer.empty(slots, rows, columns, dtype=self._dtype)
            scales = layer.empty(slots, -(-rows // r), -(-columns // c), dtype=torch.float32)
        setattr(layer, name, codes)
        setattr(layer, f"{name}_scales", scales)

    def _block_for(self, layer: Any, name: str, rows: int, columns: int) -> tuple[int, int]:
        """The rows and columns of a block; raises `ValueError` for sizes that it does not divide."""
        r, c = self._block[0] or rows, self._block[1] or columns
        halves = rows // (len(layer.spec.names) - 1) if name == "gate_up" else rows
        if (self._dtype is None and (columns % c or columns % 8)) or (1 < r < rows and halves % r):
            raise ValueError(
                f"{layer.prefix}: {name} has {halves} rows and {columns} columns on this rank, which blocks of {r} x "
                f"{c} do not divide; divide the model over fewer devices"
            )
        return r, c

    def rows(self, layer: Any) -> list[Tensor]:
        return [*super().rows(layer), *(getattr(layer, f"{name}_scales") for name in PARTS)]

    def bias_slots(self, layer: Any) -> list[WeightSlot]:
        """Those of biases, which checkpoints keep in the model's type."""
        return [slot for slot in PlainExperts.weight_slots(self, layer) if slot.name.endswith("bias")]

    def stored(self, layer: Any, name: str) -> CodedWeights:
        """How a matrix, "gate_up" or "down", is kept."""
        return CodedWeights(getattr(layer, name), getattr(layer, f"{name}_scales"), self.blocks[name])

    def dequantized(self, layer: Any, name: str, dtype: torch.dtype) -> Tensor:
        """[slots, N, K] of "gate_up" or "down"."""
        out: Tensor = self.stored(layer, name).weight(layer.ops, dtype)
        return out

    def multiply(self, layer: Any, values: Tensor, weights: Tensor, slots: Tensor, **how: Any) -> Tensor:
        pair = [self.stored(layer, name) for name in PARTS]
        out: Tensor = layer.ops.coded_experts(values, *pair, weights, slots, rounds=self.rounds, **how)
        return out

    def matrices(self, layer: Any, dtype: torch.dtype) -> ExpertMatrices | None:
        gate_up, down = (self.dequantized(layer, name, dtype) for name in PARTS)
        return (gate_up, down), (layer.gate_up_bias, layer.down_bias)

    def apply(self, layer: Any, dispatched: Dispatched) -> Tensor:
        if dispatched.counts is None:
            return super().apply(layer, dispatched)
        dtype = dispatched.values.dtype
        shown: Any = Shown(layer, **{name: self.dequantized(layer, name, dtype) for name in PARTS})
        return super().apply(shown, dispatched)


class RoundedExperts(CodedExperts):
    """Weights that come in 16 or 32 bits: rounded by rows to 8-bit codes, or by groups of columns to nibbles."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__(dtype, (1, 0), rounds=dtype is not None and dtype.is_floating_point)

    def _block_for(self, layer: Any, name: str, rows: int, columns: int) -> tuple[int, int]:
        if self._dtype is None:
            self._block = (1, next((size for size in (128, 64, 32, 16, 8) if columns % size == 0), 0))
        return super()._block_for(layer, name, rows, columns)

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        slots = []
        for slot in super().weight_slots(layer):
            name = next((one for one in PARTS if slot.parameter is getattr(layer, one)), None)
            slots.append(slot if name is None else replace(slot, take=partial(self._round, layer, name, slot)))
        return slots

    def _round(self, layer: Any, name: str, slot: WeightSlot, weight: Tensor) -> None:
        weight = weight.transpose(-1, -2).contiguous() if slot.transposed else weight
        codes, scales = (getattr(layer, part).data[slot.region] for part in (name, f"{name}_scales"))
        for expert, rows in enumerate(weight.reshape(-1, *weight.shape[-2:])):
            for some in runs_of_rows(rows):
                if self._dtype is None:
                    found, own = round_groups(rows[some], scales.shape[-1])
                    codes[expert, some], scales[expert, some] = pack_nibbles(found), own.to(scales.dtype)
                else:
                    codes[expert, some], scales[expert, some] = quantize_rows(rows[some], self._dtype)


class StoredExperts(CodedExperts):
    """Experts whose codes are in the checkpoint, three tensors for each: "PREFIX.E.gate_proj.weight" and its scales.

    `names` are the ends of the names of codes and of scales, `ignored` of tensors that may be there. `exponents` is the
    type of scales of blocks that are stored as powers of two.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        block: tuple[int, int],
        names: tuple[str, str],
        *,
        per_tensor: bool = False,
        ignored: Sequence[str] = (),
        exponents: torch.dtype | None = None,
        rounds: bool = False,
    ) -> None:
        super().__init__(dtype, (1, 0) if per_tensor else block, rounds=rounds)
        self._exponents = exponents
        self._names, self._per_tensor, self._ignored = names, per_tensor, ignored

    def weight_slots(self, layer: Any) -> list[WeightSlot]:
        codes, scales = self._names
        packs = 8 if self._dtype is None else 1
        dtype = torch.int32 if self._dtype is None else self._dtype
        size = WEIGHTS / CODES[self._dtype][1] if self._dtype is not None else SCALES[0]
        near = None if self._dtype is None else CODES[self._dtype]
        slots = self.bias_slots(layer) + [
            WeightSlot(f"{layer.prefix}.{expert}.{part}.{end}", (), None)
            for end in self._ignored
            for expert in range(layer.spec.num_experts)
            for part in layer.spec.names
        ]
        slots += _slots(
            layer, codes, lambda name: (1, packs), lambda name: getattr(layer, name), dtype=dtype, near=near
        )
        scaled = {"near": (size, size / 4)}
        if self._per_tensor:
            return slots + _numbers(layer, scales, **scaled)
        units = {
            name: (self._block[0] and self.blocks[name][0], self._block[1] and self.blocks[name][1]) for name in PARTS
        }
        found = _slots(layer, scales, units.__getitem__, lambda name: getattr(layer, f"{name}_scales"), **scaled)
        return slots + with_exponents(found, self._exponents)


def linears(layer: Any) -> list[tuple[int, str, int, LinearSpec]]:
    """(local slot, "gate_up" or "down", first row in it, the linear layer) of each tensor of this rank's experts."""
    spec, width = layer.spec, layer.width
    start = layer.divided.rank * width
    *inner, down = spec.names
    found = []
    for local, expert in enumerate(layer.held):
        name = f"{layer.prefix}.{expert}"
        for half, part in enumerate(inner):
            rows = Rows(f"{name}.{part}", spec.intermediate_size, start, width)
            found.append(
                (local, "gate_up", half * width, LinearSpec((rows,), slice(0, spec.hidden_size), spec.hidden_size))
            )
        rows = Rows(f"{name}.{down}", spec.hidden_size, 0, spec.hidden_size)
        found.append((local, "down", 0, LinearSpec((rows,), slice(start, start + width), spec.intermediate_size)))
    return found


def _slots(
    layer: Any,
    end: str,
    units: Callable[[str], tuple[int, int]],
    parameter: Callable[[str], nn.Parameter],
    **options: Any,
) -> list[WeightSlot]:
    slots = []
    for local, name, first, spec in linears(layer):
        rows_per, columns_per = units(name)
        offset = first // rows_per if rows_per else int(first > 0)
        for slot in WeightSlot.sharded(end, parameter(name), spec, rows_per, columns_per, **options):
            rows = slice(slot.region[0].start + offset, slot.region[0].stop + offset)
            slots.append(replace(slot, region=(slice(local, local + 1), rows)))
    return slots + elsewhere(layer, end)


def _numbers(layer: Any, end: str, **options: Any) -> list[WeightSlot]:
    """One number for each tensor, which becomes one for each of its rows."""
    slots = []
    for local, name, first, spec in linears(layer):
        region = (slice(local, local + 1), slice(first, first + spec.out_features))
        scales = getattr(layer, f"{name}_scales")
        slots.append(WeightSlot(f"{spec.rows[0].name}.{end}", (), scales, (), region, **options))
    return slots + elsewhere(layer, end)


def elsewhere(layer: Any, end: str) -> list[WeightSlot]:
    """The tensors of experts that other ranks hold, which this one does not read."""
    others = sorted(set(range(layer.spec.num_experts)).difference(layer.held))
    return [
        WeightSlot(f"{layer.prefix}.{expert}.{part}.{end}", (), None) for expert in others for part in layer.spec.names
    ]
