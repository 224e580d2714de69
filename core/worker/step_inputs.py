"""What one step feeds to the model: ids, positions and the attention plans.

Built on the device from a few small host arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..interfaces.attention import AttentionBatch
from ..interfaces.platform import StepShape, Streams
from ..interfaces.step import PrefixRows, StepPlan
from ..ops import Ops
from ..ops.step import StepBuffers, StepSizes
from .request_state import BlockTables, RequestState
from .shared_prefixes import PrefixTiles


@dataclass
class StepInputs:
    """T tokens of B rows. `input_ids` int32 [T], `positions` int64 [T]; `batches` the rows as each KV group sees them.

    `rows` and `slots` int32 [S] are, on the device, the last token and the slot of each row that samples (`rows` None:
    the first S tokens, in order); `host_slots` [S] the same slots on the host; `lengths` int32 [S] tokens known then:
    the position to be drawn.
    """

    input_ids: Tensor
    positions: Tensor
    batches: Sequence[AttentionBatch]
    rows: Tensor | None
    slots: Tensor
    lengths: Tensor
    host_slots: np.ndarray


@dataclass
class _Views:
    """The buffers cut to the sizes of a step; per KV group its block table and slot mapping."""

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    groups: list[tuple[Tensor, Tensor]]


class InputBuilder:
    """Builds the inputs of one worker's steps, in buffers that never move.

    `num_cacheless` plans are made besides those of KV groups. `correct` makes the plan's counts exact on the device:
    int32 [3, B] slots, tokens computed, tokens scheduled.
    """

    def __init__(
        self,
        state: RequestState,
        tables: BlockTables,
        *,
        correct: Callable[[Tensor], None],
        buffers: StepBuffers,
        block_size: int,
        ops: Ops,
        streams: Streams,
        num_cacheless: int = 0,
        prefixes: PrefixTiles | None = None,
    ) -> None:
        self.buffers = buffers
        self._state = state
        self._tables = tables
        self._correct = correct
        self._block_size = block_size
        self._ops = ops
        self._streams = streams
        self._prefixes = prefixes
        nothing = buffers.query_start.new_empty(0)
        self._cacheless = [(nothing.view(0, 0), nothing)] * num_cacheless
        # decode steps follow one another in the same sizes, and cutting a tensor costs more than what is cut from it
        self._cut: tuple[tuple[int, int, int], _Views] | None = None

    def build(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """One transfer of the batch's index vector and counts; everything else is computed on the device."""
        host_seq_lens = plan.num_computed + plan.num_scheduled
        sampling = plan.samples.nonzero()[0]
        batch = len(plan.slots)
        decodes = len(sampling) == shape.num_tokens
        if decodes:
            rows = None
            staged = self._streams.stage(np.array((plan.slots, plan.num_computed, plan.num_scheduled), np.int32))
            host_slots = plan.slots
        else:
            host_slots = plan.slots[sampling]
            staged, rows, slots, lengths = self._stage_rows(plan, sampling, host_slots, host_seq_lens[sampling])
        max_blocks = -(-int(host_seq_lens.max()) // self._block_size)
        sizes = StepSizes(shape.num_tokens, shape.padded_tokens, shape.padded_rows, max_blocks, self._block_size)
        self._correct(staged)
        self._ops.build_inputs(self.buffers, self._state.token_ids, self._tables.tables, staged, sizes)
        views = self._views(shape, max_blocks)
        if decodes:
            slots, lengths = staged[0], views.seq_lens if shape.padded_rows == batch else views.seq_lens[:batch]
        query_lens, seq_lens = plan.num_scheduled, host_seq_lens
        if shape.padded_rows > batch:
            query_lens, seq_lens = _padded(query_lens, shape.padded_rows), _padded(seq_lens, shape.padded_rows)
        return StepInputs(
            input_ids=views.input_ids,
            positions=views.positions,
            batches=self.batches(shape, query_lens, seq_lens, max_blocks, plan.deterministic, plan.prefixes),
            rows=rows,
            slots=slots,
            lengths=lengths,
            host_slots=host_slots,
        )

    def _stage_rows(
        self, plan: StepPlan, sampling: np.ndarray, host_slots: np.ndarray, host_lengths: np.ndarray
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(slots, computed, scheduled [3, B]; last token, slot and length of each sampling row [S])."""
        batch = len(plan.slots)
        last = plan.num_scheduled.cumsum()[sampling] - 1
        parts = (plan.slots, plan.num_computed, plan.num_scheduled, last, host_slots, host_lengths)
        staged = self._streams.stage(np.concatenate(parts).astype(np.int32, copy=False))
        rows, slots, lengths = staged[3 * batch :].view(3, len(sampling)).unbind(0)
        return staged[: 3 * batch].view(3, batch), rows, slots, lengths

    def batches(
        self,
        shape: StepShape,
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        max_blocks: int,
        deterministic: bool = False,
        prefixes: Sequence[PrefixRows] = (),
    ) -> list[AttentionBatch]:
        """What the buffers hold, as each KV group's backend sees it, then those of layers without a cache."""
        views = self._views(shape, max_blocks)
        prefix = None
        if shape.shared and self._prefixes is not None:
            prefix = self._prefixes.fill(prefixes, shape.padded_rows)
        return [
            AttentionBatch(
                num_tokens=shape.padded_tokens,
                query_start=views.query_start,
                seq_lens=views.seq_lens,
                block_table=table,
                slot_mapping=mapping,
                host_query_lens=query_lens,
                host_seq_lens=seq_lens,
                deterministic=deterministic,
                prefix=prefix,
            )
            for table, mapping in (*views.groups, *self._cacheless)
        ]

    def _views(self, shape: StepShape, max_blocks: int) -> _Views:
        tokens, rows = shape.padded_tokens, shape.padded_rows
        sizes = tokens, rows, max_blocks
        if self._cut is None or self._cut[0] != sizes:
            buffers = self.buffers
            groups = zip(buffers.tables, buffers.slot_mapping, strict=True)
            views = _Views(
                input_ids=buffers.input_ids[:tokens],
                positions=buffers.positions[:tokens],
                query_start=buffers.query_start[: rows + 1],
                seq_lens=buffers.seq_lens[:rows],
                groups=[(table[:rows, :max_blocks], mapping[:tokens]) for table, mapping in groups],
            )
            self._cut = sizes, views
        return self._cut[1]


def _padded(lens: np.ndarray, rows: int) -> np.ndarray:
    """`lens` with zeros up to `rows`."""
    out = np.zeros(rows, lens.dtype)
    out[: len(lens)] = lens
    return out
