"""What one step feeds to the model: ids, positions and the attention plans.

Built on the device from a few small host arrays. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..interfaces.attention import AttentionBackend, AttentionBatch
from ..interfaces.kv import KVLayout
from ..interfaces.platform import StepShape, Streams
from ..interfaces.step import StepPlan
from ..ops import Ops
from .request_state import BlockTables, RequestState


@dataclass(frozen=True)
class StepInputs:
    """T tokens of B rows. `input_ids` int32 [T], `positions` int64 [T], `seq_lens` int32 [B] after this step.

    `rows` and `slots` int32 [S] are, on the device, the last token and the slot of each row that samples;
    `host_slots` [S] the same slots on the host; `lengths` int32 [S] tokens known then: the position to be drawn.
    """

    input_ids: Tensor
    positions: Tensor
    plans: Sequence[Any]
    rows: Tensor
    slots: Tensor
    lengths: Tensor
    host_slots: np.ndarray


def build_step_inputs(
    plan: StepPlan,
    shape: StepShape,
    state: RequestState,
    tables: BlockTables,
    backends: Sequence[AttentionBackend],
    *,
    layout: KVLayout,
    ops: Ops,
    streams: Streams,
) -> StepInputs:
    """One transfer of the batch's index vector and counts; everything else is computed on the device."""
    host_ends = np.cumsum(plan.num_scheduled, dtype=np.int32)
    host_seq_lens = plan.num_computed + plan.num_scheduled
    sampling = np.flatnonzero(plan.samples)
    batch = len(plan.slots)
    packed = np.concatenate(
        (
            plan.slots,
            plan.num_computed,
            plan.num_scheduled,
            host_ends[sampling] - 1,
            plan.slots[sampling],
            host_seq_lens[sampling],
        )
    ).astype(np.int32, copy=False)
    staged = streams.stage(packed)
    slots, num_computed, num_scheduled = staged[: 3 * batch].view(3, batch).unbind(0)
    rows, sample_slots, lengths = staged[3 * batch :].view(3, len(sampling)).unbind(0)
    input_ids, positions, query_start, seq_lens = ops.build_inputs(
        state.token_ids, slots, num_computed, num_scheduled, shape.padded_tokens
    )
    block_size = layout.block_size
    max_blocks = -(-int(host_seq_lens.max()) // block_size)
    plans = []
    for table, backend in zip(tables.gather(slots, max_blocks), backends, strict=True):
        batch_view = AttentionBatch(
            num_tokens=shape.padded_tokens,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=ops.slot_mapping(table, query_start, positions, block_size),
            host_query_lens=plan.num_scheduled,
            host_seq_lens=host_seq_lens,
            deterministic=plan.deterministic,
        )
        plans.append(backend.plan(batch_view))
    return StepInputs(input_ids, positions, plans, rows, sample_slots, lengths, plan.slots[sampling])
