"""Request state on the device, in stable slots, and the block tables beside it.

The host sends small deltas, gathered over a step and applied in one scatter per table ("staged writes"). Knows no
sampling parameter (the sampler keeps its own) and no scheduling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...interfaces.platform import AnyShape, Shapes, Streams
from ...interfaces.step import BlockAppend, NewRequest
from ...ops import Ops


class StagedRows:
    """Pending writes of runs of int32 into rows of one table [R, width]."""

    def __init__(self, table: Tensor, ops: Ops, streams: Streams, shapes: Shapes | None = None) -> None:
        self.table = table
        self._ops = ops
        self._streams = streams
        self._shapes = shapes or AnyShape()
        self._heads: list[np.ndarray] = []  # int32 [3, runs]: slots, starts, lengths
        self._values: list[np.ndarray] = []

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
        count, length = self._shapes.pad("runs", heads.shape[1]), self._shapes.pad("values", len(values))
        if count > heads.shape[1]:
            filling = np.repeat(np.array([[-1], [0], [0]], np.int32), count - heads.shape[1], 1)
            heads = np.concatenate((heads, filling), 1)
        packed = np.zeros(3 * count + length, np.int32)
        packed[: 3 * count], packed[3 * count :][: len(values)] = heads.ravel(), values
        staged = self._streams.stage(packed)
        slots, starts, lengths = staged[: 3 * count].view(3, count).unbind(0)
        self._ops.write_rows(self.table, slots, starts, lengths, staged[3 * count :])
        self._heads.clear()
        self._values.clear()


class RequestState:
    """Token ids of every slot on the device, and lengths on the host.

    `token_ids` int32 [R, max_len] holds prompt, generated tokens and, behind the newest, whatever an older request
    left; only what lies before a request's known length is ever read.
    """

    def __init__(
        self,
        max_slots: int,
        max_len: int,
        *,
        ops: Ops,
        streams: Streams,
        device: torch.device,
        shapes: Shapes | None = None,
    ) -> None:
        self.token_ids = torch.zeros((max_slots, max_len), dtype=torch.int32, device=device)
        self.prompt_len = np.zeros(max_slots, dtype=np.int32)
        self.prefill_len = np.zeros(max_slots, dtype=np.int32)
        self.request_ids: list[str | None] = [None] * max_slots
        self._staged = StagedRows(self.token_ids, ops, streams, shapes)

    def add(self, request: NewRequest) -> None:
        """A request takes its slot; every field of it is set anew."""
        slot = request.slot
        self.request_ids[slot] = request.request_id
        self.prompt_len[slot] = request.prompt_len
        self.prefill_len[slot] = len(request.token_ids)
        self._staged.write(slot, 0, request.token_ids)

    def remove(self, slot: int) -> None:
        """The request left; unknown slots are fine (an id may be removed and added in one step)."""
        self.request_ids[slot] = None
        self.prompt_len[slot] = self.prefill_len[slot] = 0

    def apply_staged_writes(self) -> None:
        """Sends what is pending to the device."""
        self._staged.apply()


class BlockTables:
    """One table int32 [R, max_blocks] per KV group."""

    def __init__(
        self,
        num_groups: int,
        max_slots: int,
        max_blocks: int,
        *,
        ops: Ops,
        streams: Streams,
        device: torch.device,
        shapes: Shapes | None = None,
    ) -> None:
        self.tables = [
            torch.zeros((max_slots, max_blocks), dtype=torch.int32, device=device) for _ in range(num_groups)
        ]
        self._staged = [StagedRows(table, ops, streams, shapes) for table in self.tables]

    def add(self, request: NewRequest) -> None:
        """The blocks that a request brings, over whatever its slot held."""
        for staged, block_ids in zip(self._staged, request.block_ids, strict=True):
            staged.write(request.slot, 0, block_ids)

    def append(self, appends: list[BlockAppend]) -> None:
        """Blocks that running requests gained."""
        for append in appends:
            self._staged[append.group].write_single(append.slots, append.offsets, append.block_ids)

    def apply_staged_writes(self) -> None:
        """Sends what is pending to the device; also on steps without tokens, for connectors that load into blocks."""
        for staged in self._staged:
            staged.apply()
