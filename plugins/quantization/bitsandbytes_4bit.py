"""Layers of bitsandbytes' 4 bits: codes in one run over the whole tensor, the first of a byte in its high bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import LinearSpec, StoredTensor
from frame.layers import Rows, WeightSlot

from .codebook import CodebookLinear
from .columnwise import runs_of
from .scaled import WEIGHTS

#: bitsandbytes' numbers, for made-up weights: quantiles of the normal distribution, and floats.
TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * one / 12 for sign in (1, -1) for one in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)),
}  # fmt: skip


@dataclass(frozen=True)
class StoredCodes:
    """A scale for each `block` of codes, kept as a code too if `nested`; `type` names the numbers, or is "int8"."""

    block: int
    nested: bool
    type: str


class FourBitLinear(CodebookLinear):
    """The numbers come with the file, the same for all tensors of a layer. Nested scales are made plain in loading."""

    def __init__(self, stored: StoredCodes, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(stored.block, torch.float32)
        self._stored, self._tensors = stored, tensors

    @property
    def stages(self) -> bool:  # type: ignore[override]
        """Codes of scales are held until what they stand for is there."""
        return self._stored.nested

    def create(self, layer: Any) -> list[WeightSlot]:
        self.allocate(layer, TABLES[self._stored.type])
        layer.staged = {}
        return [slot for part, region in runs_of(layer.spec) for slot in self._slots(layer, part, region)]

    def _slots(self, layer: Any, part: Rows, region: slice) -> list[WeightSlot]:
        spec: LinearSpec = layer.spec
        name, size, start, stop = f"{part.name}.weight", spec.in_features, part.start, part.start + part.count
        half, groups = size // 2, size // self.group
        nested, number = self._stored.nested, part.total * groups
        slots = [
            WeightSlot(
                name, (part.total * half, 1), layer.packed, (slice(start * half, stop * half),), dtype=torch.uint8,
                take=partial(_put_codes, layer, region),
            ),
            WeightSlot(
                f"{name}.absmax", (number,), layer.scales, (slice(start * groups, stop * groups),),
                dtype=torch.uint8 if nested else torch.float32, near=None if nested else (WEIGHTS, WEIGHTS / 4),
                take=partial(self._stage, layer, name, "absmax") if nested else partial(_put_scales, layer, region),
            ),
            WeightSlot(
                f"{name}.quant_map", (16,), layer.table, dtype=torch.float32, optional=not self._tensors,
                take=partial(_put_table, layer, name),
            ),
        ]  # fmt: skip
        state = f"{name}.quant_state.bitsandbytes__{self._stored.type}"
        if self._tensors:
            if state not in self._tensors:
                raise ValueError(f"the checkpoint has {name}.absmax, but no {state}")
            shape, take = self._tensors[state].shape, partial(self._read_state, layer, part)
            slots.append(WeightSlot(state, shape, layer.scales, dtype=torch.uint8, take=take))
        if nested:
            outer = self._tensors.get(f"{name}.nested_absmax")
            count = outer.shape if outer is not None else (-(-number // 256),)
            for end, of, near in (
                ("nested_absmax", count, (WEIGHTS, WEIGHTS / 4)),
                ("nested_quant_map", (256,), (1.0, 0.2)),
            ):
                slots.append(
                    WeightSlot(
                        f"{name}.{end}", of, layer.scales, dtype=torch.float32, near=near,
                        take=partial(self._stage, layer, name, end),
                    )
                )  # fmt: skip
        return slots

    def begin_load(self, layer: Any) -> None:
        super().begin_load(layer)
        layer.staged = {}

    def finish_load(self, layer: Any) -> None:
        """Scales of tensors whose own codes have arrived."""
        for part, region in runs_of(layer.spec):
            staged = layer.staged.get(f"{part.name}.weight", {})
            if "absmax" not in staged:
                continue
            if missing := sorted({"nested_absmax", "nested_quant_map"}.difference(staged)):
                raise ValueError(f"{part.name}.weight.absmax came without {' and '.join(missing)}")
            state = staged.get("state", {})
            codes, outer = staged["absmax"], staged["nested_absmax"]
            first = part.start * layer.spec.in_features // self.group
            places = torch.arange(first, first + len(codes), device=codes.device) // state.get("nested_blocksize", 256)
            scales = staged["nested_quant_map"][codes.int()] * outer[places] + state.get("nested_offset", 0.0)
            _put_scales(layer, region, scales)
        layer.staged = {}

    @staticmethod
    def _stage(layer: Any, name: str, end: str, piece: Tensor) -> None:
        layer.staged.setdefault(name, {})[end] = piece.clone()

    def _read_state(self, layer: Any, part: Rows, piece: Tensor) -> None:
        """Checks what the file says of a tensor in JSON."""
        name = f"{part.name}.weight"
        try:
            state = json.loads(bytes(piece.tolist()))
            shape, block = list(state["shape"]), state["blocksize"]
            inner, offset = int(state.get("nested_blocksize", 256)), float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"the quant_state of {name} is not what bitsandbytes writes: {error!r:.80}") from None
        expected = [part.total, layer.spec.in_features]
        if shape != expected or block != self.group or inner < 1:
            raise ValueError(
                f"the quant_state of {name} says {shape} in blocks of {block}, but its tensors are {expected} in "
                f"blocks of {self.group}"
            )
        layer.staged.setdefault(name, {})["state"] = {"nested_blocksize": inner, "nested_offset": offset}


def _put_codes(layer: Any, region: slice, piece: Tensor) -> None:
    columns = layer.spec.columns
    own = piece.view(region.stop - region.start, -1)[:, columns.start // 2 : columns.stop // 2]
    turned = ((own << 4) | (own >> 4)).contiguous()
    layer.packed.data[region] = turned.view(torch.int32)


def _put_scales(layer: Any, region: slice, piece: Tensor) -> None:
    groups = layer.scales.shape[1]
    first = layer.spec.columns.start * groups // layer.spec.width
    layer.scales.data[region] = piece.view(region.stop - region.start, -1)[:, first : first + groups]


def _put_table(layer: Any, name: str, piece: Tensor) -> None:
    """Takes the sixteen numbers, the same for all tensors of a layer."""
    first = layer.staged.setdefault("", {"table": piece.clone()})["table"]
    if not torch.equal(first, piece):
        raise ValueError(f"{name}.quant_map differs from that of a tensor with which {name} is fused")
    layer.table.data.copy_(piece)
