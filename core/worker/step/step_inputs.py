"""What one step feeds to the model: ids, positions and the attention plans.

Built on the device from a few small host arrays; `fill` may be part of a captured step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from ...interfaces.attention import GroupBatch, SharedPrefix
from ...interfaces.kv import KVGroup
from ...interfaces.platform_steps import StepShape
from ...interfaces.step import PrefixRows, StepPlan
from ...ops.step import StepBuffers, StepSizes
from ..adapters import NoAdapterSlots
from ..device import Device
from .encoder import NoEncoder
from .prefix_tiles import PrefixTiles
from .request_state import RequestTables

#: A state's block stands for more tokens than any request has.
STATE_SPAN = 1 << 30


@dataclass
class StepInputs:
    """T tokens of B rows. `input_ids` int32 [T], `positions` int64 [T]: what lies there once `fill` was called.

    `batches` gives the rows as each plan sees them. `rows` and `slots` int32 [S] are, on the device, the last token
    and the slot of each row that samples (`rows` None: the first S tokens, in order); `lengths` int32 [S] tokens known
    then: the position to be drawn; `host_slots` the same slots on the host. Where the shape pads what samples, those
    behind the last of `host_slots` have token 0, slot -1 and length 0.
    """

    input_ids: Tensor
    positions: Tensor
    fill: Callable[[], None]
    batches: Callable[[], Sequence[GroupBatch]]
    rows: Tensor | None
    slots: Tensor
    lengths: Tensor
    host_slots: np.ndarray


@dataclass
class _Views:
    """The buffers cut to the sizes of a step: `rows` int32 [3, padded rows]; `slots` and `lengths` of its B real rows.

    `mappings` are the KV groups' slot mappings.
    """

    rows: Tensor
    slots: Tensor
    lengths: Tensor
    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    mappings: list[Tensor]


class InputBuilder:
    """Builds the inputs of one worker's steps, in buffers that never move.

    `groups` are the KV groups, and `plan_groups` names that of each plan, -1 for layers that keep nothing (-2: of the
    encoder). `correct` makes the plan's counts exact on the device: int32 [3, padded rows] slots, tokens computed,
    tokens scheduled; rows that fill up have slot 0 and none of either. `exact`: they are so already.
    """

    def __init__(
        self,
        device: Device,
        tables: RequestTables,
        buffers: StepBuffers,
        *,
        correct: Callable[[Tensor], None],
        exact: bool = False,
        groups: Sequence[KVGroup],
        plan_groups: Sequence[int],
        prefixes: PrefixTiles | None = None,
        adapters: NoAdapterSlots | None = None,
        encoder: NoEncoder | None = None,
    ) -> None:
        self._encoder = encoder or NoEncoder()
        self.buffers = buffers
        self._device, self._adapters = device, adapters or NoAdapterSlots()
        self._tables = tables
        self._correct, self._exact = correct, exact
        self._plan_groups = plan_groups
        self._block_sizes = [STATE_SPAN if group.keeps_states else group.block_size for group in groups]
        self._prefixes = prefixes
        nothing = buffers.query_start.new_empty(0)
        self._cacheless = nothing.view(0, 0), nothing
        # decode steps follow one another in the same sizes, and cutting a tensor costs more than what is cut from it
        self._cut: tuple[tuple[int, int, int], _Views] | None = None

    def build(self, plan: StepPlan, shape: StepShape) -> StepInputs:
        """One transfer of the batch's index vector and counts; everything else is computed on the device, by `fill`."""
        batch, slots = len(plan.slots), plan.slots
        packed = np.zeros((3, shape.padded_rows), np.int32)
        packed[0, :batch], packed[1, :batch], packed[2, :batch] = slots, plan.num_computed, plan.num_scheduled
        views = self._views(shape, batch)
        self._device.streams.stage_into(views.rows, packed)
        self._correct(views.rows)
        inputs = self._inputs(views, shape, packed, plan.prefixes, plan.deterministic)
        inputs.host_slots = slots
        if shape.padded_samples or shape.max_query_len > 1 or np.count_nonzero(plan.samples) < batch:
            sampling = plan.samples.nonzero()[0]
            ends = plan.num_scheduled.cumsum()[sampling] - 1
            padded = shape.padded_samples if shape.padded_samples and len(sampling) else len(sampling)
            packed_rows = np.zeros((3, padded), np.int32)
            packed_rows[1] = -1
            packed_rows[:, : len(sampling)] = ends, slots[sampling], packed[1, sampling] + packed[2, sampling]
            inputs.rows, inputs.slots, inputs.lengths = self._device.streams.stage(packed_rows).unbind(0)
            inputs.host_slots = slots[sampling]
        return inputs

    def padding(self, shape: StepShape) -> StepInputs:
        """Inputs without a token, while the host says that each row has one, at the longest position of the shape."""
        rows = np.zeros((3, shape.padded_rows), np.int32)
        rows[1], rows[2] = self._longest(shape) - 1, 1
        views = self._views(shape, 0)
        views.rows.zero_()
        return self._inputs(views, shape, rows, (), shape.deterministic)

    def _inputs(
        self, views: _Views, shape: StepShape, rows: np.ndarray, prefixes: Sequence[PrefixRows], deterministic: bool
    ) -> StepInputs:
        """Inputs of which every row samples; `rows` int32 [3, padded rows] are the host's copy of `views.rows`."""
        prefix = self._prefixes.fill(prefixes, shape.padded_rows) if shape.shared and self._prefixes else None
        return StepInputs(
            input_ids=views.input_ids,
            positions=views.positions,
            fill=partial(self._fill, views, shape),
            batches=partial(self._batches, views, shape, rows, prefix, deterministic),
            rows=None,
            slots=views.slots,
            lengths=views.lengths,
            host_slots=np.zeros(0, np.int32),
        )

    def _longest(self, shape: StepShape) -> int:
        return shape.max_seq_len or self._tables.token_ids.shape[1]

    def _max_blocks(self, shape: StepShape) -> list[int]:
        return [-(-self._longest(shape) // size) for size in self._block_sizes]

    def _fill(self, views: _Views, shape: StepShape) -> None:
        sizes = StepSizes(shape.padded_tokens, self._max_blocks(shape), self._block_sizes)
        self._device.ops.build_inputs(self.buffers, self._tables.token_ids, self._tables.blocks, views.rows, sizes)
        self._adapters.fill(views.rows[0], views.query_start, shape.padded_tokens)

    def _batches(
        self, views: _Views, shape: StepShape, rows: np.ndarray, prefix: SharedPrefix | None, deterministic: bool
    ) -> list[GroupBatch]:
        """The batch as each plan sees it: the same rows, and the block table of the plan's KV group."""
        seq_lens = rows[1] + rows[2]
        max_query_len = max(int(rows[2].max(initial=0)), shape.max_query_len)
        max_seq_len = max(int(seq_lens.max(initial=0)), shape.max_seq_len)
        widths = zip(self.buffers.tables, self._max_blocks(shape), strict=True)
        tables = [table[: shape.padded_rows, :width] for table, width in widths]
        groups = [*zip(tables, views.mappings, strict=True), self._cacheless]
        found = [
            GroupBatch(
                num_tokens=shape.padded_tokens,
                query_start=views.query_start,
                seq_lens=views.seq_lens,
                block_table=table,
                slot_mapping=mapping,
                host_query_lens=rows[2],
                host_seq_lens=seq_lens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                deterministic=deterministic,
                prefix=prefix,
                exact_lens=self._exact and len(views.slots) > 0,  # not of padding
            )
            for table, mapping in (groups[max(group, -1)] for group in self._plan_groups)
        ]
        return self._encoder.batches(self._plan_groups, views.rows[0], found)

    def _views(self, shape: StepShape, batch: int) -> _Views:
        tokens, rows = shape.padded_tokens, shape.padded_rows
        sizes = tokens, rows, batch
        if self._cut is None or self._cut[0] != sizes:
            buffers = self.buffers
            every = buffers.rows[: 3 * rows].view(3, rows)
            views = _Views(
                rows=every,
                slots=every[0, :batch],
                lengths=buffers.seq_lens[:batch],
                input_ids=buffers.input_ids[:tokens],
                positions=buffers.positions[:tokens],
                query_start=buffers.query_start[: rows + 1],
                seq_lens=buffers.seq_lens[:rows],
                mappings=[mapping[:tokens] for mapping in buffers.slot_mapping],
            )
            self._cut = sizes, views
        return self._cut[1]
