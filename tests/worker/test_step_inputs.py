"""What a step feeds to the model, for pure decodes, mixtures and padded sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frame.core.interfaces.kv import FullKV, KVGroup
from frame.core.interfaces.platform_steps import StepShape
from frame.core.interfaces.step import StepPlan
from frame.core.ops import Ops
from frame.core.ops.step import StepBuffers
from frame.core.worker.device import Device
from frame.core.worker.step.request_state import RequestTables
from frame.core.worker.step.step_inputs import InputBuilder, StepInputs
from frame.plugins.platforms.cpu import HostStreams
from frame.plugins.platforms.cpu_ops import CpuOps

SLOTS, LENGTH, BLOCK = 8, 64, 4
SIZES = (BLOCK, 2 * BLOCK)


@pytest.fixture(params=[Ops(), CpuOps()], ids=["reference", "cpu"])
def builder(request: pytest.FixtureRequest) -> InputBuilder:
    device = Device(request.param, HostStreams(), torch.device("cpu"))
    widths = [LENGTH // size for size in SIZES]
    tables = RequestTables(device, SLOTS, LENGTH, widths)
    tables.token_ids.copy_(torch.arange(SLOTS * LENGTH).view(SLOTS, LENGTH))
    for number, table in enumerate(tables.blocks):
        table.copy_(torch.arange(table.numel()).view(table.shape) * 2 + number)
    buffers = StepBuffers.allocate(64, SLOTS, widths, device.device)
    spec = FullKV(num_kv_heads=1, head_dim=1, dtype="float32")
    groups = [KVGroup(specs=(spec,), layers=(str(size),), block_size=size) for size in SIZES]
    return InputBuilder(
        device, tables, buffers, correct=lambda rows: None, exact=True, groups=groups, plan_groups=[0, 1]
    )


def build(builder: InputBuilder, rows: list[tuple[int, int, int, bool]], more: int = 0) -> StepInputs:
    """`rows` are (slot, computed, scheduled, whether it samples); `more` the padding rows of one token each."""
    slots, computed, scheduled = (np.array(part, np.int32) for part in list(zip(*rows, strict=True))[:3])
    plan = StepPlan(
        step=0, removed_slots=np.zeros(0, np.int32), added=[], appends=[], slots=slots, num_scheduled=scheduled,
        num_computed=computed, samples=np.array([row[3] for row in rows]), num_drafts=np.zeros(len(rows), np.int32),
    )  # fmt: skip
    tokens = int(scheduled.sum())
    inputs = builder.build(plan, StepShape(tokens + more, len(rows) + more, max_query_len=max(row[2] for row in rows)))
    inputs.fill()
    return inputs


def check(builder: InputBuilder, rows: list[tuple[int, int, int, bool]], more: int = 0) -> None:
    inputs = build(builder, rows, more)
    tokens = [(slot, computed + i) for slot, computed, scheduled, _ in rows for i in range(scheduled)]
    assert inputs.input_ids.tolist() == [slot * LENGTH + place for slot, place in tokens] + [0] * more
    assert inputs.positions.tolist() == [place for _, place in tokens] + [0] * more
    sampling = [row for row in rows if row[3]]
    ends = np.cumsum([row[2] for row in rows]) - 1
    last = [int(end) for end, row in zip(ends, rows, strict=True) if row[3]]
    assert (list(range(len(sampling))) if inputs.rows is None else inputs.rows.tolist()) == last
    assert inputs.slots.tolist() == inputs.host_slots.tolist() == [row[0] for row in sampling]
    assert inputs.lengths.tolist() == [computed + scheduled for _, computed, scheduled, _ in sampling]
    for number, (batch, size) in enumerate(zip(inputs.batches(), SIZES, strict=True)):
        lens = [computed + scheduled for _, computed, scheduled, _ in rows] + [0] * more
        assert batch.seq_lens.tolist() == batch.host_seq_lens.tolist() == lens
        assert batch.exact_lens
        assert batch.host_query_lens.tolist() == [row[2] for row in rows] + [0] * more
        assert batch.num_tokens == len(tokens) + more
        assert batch.query_start.tolist() == [0, *(ends + 1).tolist()] + [len(tokens)] * more
        blocks = [(slot * (LENGTH // size) + place // size) * 2 + number for slot, place in tokens]
        places = [block * size + place % size for block, (_, place) in zip(blocks, tokens, strict=True)]
        assert batch.slot_mapping.tolist() == places + [-1] * more


def test_inputs_of_steps_that_follow_one_another(builder: InputBuilder) -> None:
    decodes = [(5, 9, 1, True), (0, 30, 1, True), (3, 1, 1, True)]
    check(builder, decodes)
    check(builder, [(slot, computed + 1, 1, True) for slot, computed, _, _ in decodes])
    check(builder, [(5, 11, 1, True), (0, 32, 1, True)], more=2)
    check(builder, [(5, 12, 1, True), (0, 33, 1, True)], more=2)
    check(builder, [(5, 13, 1, True), (2, 0, 7, False), (1, 4, 9, True)])
    check(builder, [(2, 7, 1, False), (5, 14, 1, True)])
    check(builder, [(2, 8, 1, False)])


def test_decodes_of_equal_sizes_read_the_same_memory_without_being_cut_again(builder: InputBuilder) -> None:
    first = build(builder, [(1, 5, 1, True), (2, 5, 1, True)])
    second = build(builder, [(1, 6, 1, True), (2, 6, 1, True)])
    assert first.rows is second.rows is None
    assert first.input_ids is second.input_ids
    assert first.slots is second.slots
    assert first.batches()[0].block_table.data_ptr() == second.batches()[0].block_table.data_ptr()


def test_lengths_of_padding_are_not_said_to_be_exact(builder: InputBuilder) -> None:
    """The host says that each row has a token, which none has."""
    inputs = builder.padding(StepShape(4, 4, max_query_len=1))
    assert not any(batch.exact_lens for batch in inputs.batches())
