"""What the device knows of each request, by slot: its token ids and its blocks in each KV group.

The host sends small changes, gathered over a step and applied in one scatter per table ("staged writes"). The sampler
keeps sampling parameters itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...interfaces.step import BlockAppend, NewRequest
from ..device import Device


class StagedRows:
    """Pending writes of runs of int32 into rows of one table [R, width]."""

    def __init__(self, device: Device, table: Tensor) -> None:
        self.table = table
        self._device = device
        self._heads: list[np.ndarray] = []  # int32 [3, runs]: slots, starts, lengths
        self._values: list[np.ndarray] = []
        self._num_left = 0  # of the entries of both, those that a failed step left

    def begin(self) -> None:
        """Called when a step begins: what is pending then was left by one that failed."""
        self._num_left = len(self._heads)

    def replace(self, slot: int, values: np.ndarray) -> None:
        """Row `slot` begins with `values`; what a failed step left for it is forgotten: runs must not overlap."""
        for index in range(self._num_left):
            kept = self._heads[index][0] != slot
            if not kept.all():
                self._values[index] = self._values[index][np.repeat(kept, self._heads[index][2])]
                self._heads[index] = self._heads[index][:, kept]
        self.write(slot, 0, values)

    def write(self, slot: int, start: int, values: np.ndarray) -> None:
        """Row `slot` gets `values` from column `start` on. Raises when they would not fit."""
        if start + len(values) > self.table.shape[1]:
            raise ValueError(f"slot {slot}: columns {start}..{start + len(values)} of {self.table.shape[1]}")
        if len(values):
            self._heads.append(np.array(((slot,), (start,), (len(values),)), np.int32))
            self._values.append(values)

    def write_single(self, slots: np.ndarray, starts: np.ndarray, values: np.ndarray) -> None:
        """Many single values at once: table[slots[i], starts[i]] = values[i]."""
        self._heads.append(np.array((slots, starts, np.ones_like(slots)), np.int32))
        self._values.append(values)

    def apply(self) -> None:
        """One transfer and one scatter for everything pending."""
        if not self._heads:
            return
        heads = self._heads[0] if len(self._heads) == 1 else np.concatenate(self._heads, 1)
        values = self._values[0] if len(self._values) == 1 else np.concatenate(self._values)
        if (padded := self._device.padded("runs", heads)) is not heads:
            padded[:, heads.shape[1] :] = ((-1,), (0,), (0,))
            heads = padded
        count, values = heads.shape[1], self._device.padded("values", values)
        packed = np.empty(3 * count + len(values), np.int32)
        packed[: 3 * count], packed[3 * count :] = heads.ravel(), values
        staged = self._device.streams.stage(packed)
        slots, starts, lengths = staged[: 3 * count].view(3, count).unbind(0)
        self._device.ops.write_rows(self.table, slots, starts, lengths, staged[3 * count :])
        self._heads.clear()
        self._values.clear()


class RequestTables:
    """`token_ids` int32 [R, max_len] and, for each KV group, one of `blocks` int32 [R, most blocks of a request].

    A row of `token_ids` holds prompt, generated tokens and, behind the newest, whatever an older request left; only
    what lies before a request's known length is ever read.
    """

    def __init__(self, device: Device, max_slots: int, max_len: int, max_blocks: Sequence[int]) -> None:
        self.token_ids = device.zeros(max_slots, max_len, dtype=torch.int32)
        self.blocks = [device.zeros(max_slots, width, dtype=torch.int32) for width in max_blocks]
        self._staged = [StagedRows(device, table) for table in (self.token_ids, *self.blocks)]

    def begin(self) -> None:
        """Called when a step begins, before its changes."""
        for staged in self._staged:
            staged.begin()

    def add(self, request: NewRequest) -> None:
        """A request's tokens and blocks go over whatever its slot held."""
        self._staged[0].replace(request.slot, request.token_ids)
        for staged, block_ids in zip(self._staged[1:], request.block_ids, strict=True):
            staged.replace(request.slot, block_ids)

    def append(self, appends: list[BlockAppend]) -> None:
        """Blocks that running requests gained."""
        for append in appends:
            self._staged[1 + append.group].write_single(append.slots, append.offsets, append.block_ids)

    def apply_staged_writes(self) -> None:
        """Sends what is pending to the device; also on steps without tokens, for connectors that load into blocks."""
        for staged in self._staged:
            staged.apply()
