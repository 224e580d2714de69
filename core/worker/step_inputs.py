"""What one step feeds to the model: ids, positions and the attention plans.

Built on the device from a few small host arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..interfaces.attention import AttentionBatch
from ..interfaces.platform import StepShape, Streams
from ..interfaces.step import StepPlan
from ..ops import Ops
from ..ops.step import StepBuffers, StepSizes
from .request_state import BlockTables, RequestState


@dataclass(frozen=True)
class StepInputs:
    """T tokens of B rows. `input_ids` int32 [T], `positions` int64 [T]; `batches` the rows as each KV group sees them.

    `rows` and `slots` int32 [S] are, on the device, the last token and the slot of each row that samples;
    `host_slots` [S] the same slots on the host; `lengths` int32 [S] tokens known then: the position to be drawn.
    """

    input_ids: Tensor
    positions: Tensor
    batches: Sequence[AttentionBatch]
    rows: Tensor
    slots: Tensor
    lengths: Tensor
    host_slots: np.ndarray


def build_step_inputs(
    plan: StepPlan,
    shape: StepShape,
    state: RequestState,
    tables: BlockTables,
    *,
    buffers: StepBuffers,
    block_size: int,
    ops: Ops,
    streams: Streams,
) -> StepInputs:
    """One transfer of the batch's index vector and counts; everything else is computed on the device."""
    host_seq_lens = plan.num_computed + plan.num_scheduled
    sampling = np.flatnonzero(plan.samples)
    batch = len(plan.slots)
    packed = np.concatenate(
        (
            plan.slots,
            plan.num_computed,
            plan.num_scheduled,
            np.cumsum(plan.num_scheduled, dtype=np.int32)[sampling] - 1,
            plan.slots[sampling],
            host_seq_lens[sampling],
        )
    ).astype(np.int32, copy=False)
    staged = streams.stage(packed)
    rows, sample_slots, lengths = staged[3 * batch :].view(3, len(sampling)).unbind(0)
    max_blocks = -(-int(host_seq_lens.max()) // block_size)
    sizes = StepSizes(shape.num_tokens, shape.padded_tokens, shape.padded_rows, max_blocks, block_size)
    ops.build_inputs(buffers, state.token_ids, tables.tables, staged[: 3 * batch].view(3, batch), sizes)
    query_lens, seq_lens = plan.num_scheduled, host_seq_lens
    if shape.padded_rows > batch:
        query_lens, seq_lens = (np.pad(lens, (0, shape.padded_rows - batch)) for lens in (query_lens, seq_lens))
    return StepInputs(
        input_ids=buffers.input_ids[: shape.padded_tokens],
        positions=buffers.positions[: shape.padded_tokens],
        batches=group_batches(buffers, shape, query_lens, seq_lens, max_blocks, plan.deterministic),
        rows=rows,
        slots=sample_slots,
        lengths=lengths,
        host_slots=plan.slots[sampling],
    )


def group_batches(
    buffers: StepBuffers,
    shape: StepShape,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    max_blocks: int,
    deterministic: bool = False,
) -> list[AttentionBatch]:
    """What the buffers hold, as each KV group's backend sees it."""
    return [
        AttentionBatch(
            num_tokens=shape.padded_tokens,
            query_start=buffers.query_start[: shape.padded_rows + 1],
            seq_lens=buffers.seq_lens[: shape.padded_rows],
            block_table=table[: shape.padded_rows, :max_blocks],
            slot_mapping=mapping[: shape.padded_tokens],
            host_query_lens=query_lens,
            host_seq_lens=seq_lens,
            deterministic=deterministic,
        )
        for table, mapping in zip(buffers.tables, buffers.slot_mapping, strict=True)
    ]
