"""The runner's device work in Triton; the references are in `frame.core.ops.step`.

One launch each: on a device a step's host time is mostly launches. Knows no request.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


# Counts and addresses change from step to step: kernels specialised on them would be compiled while requests wait.
@triton.jit(do_not_specialize=["batch", "padded_tokens", "max_blocks"], do_not_specialize_on_alignment=["rows"])
def _build_inputs(
    rows, token_ids, stride_ids, tables, inputs, slot_mapping, batch, padded_tokens, max_blocks,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    table, stride_table, own_table, stride_own = tables
    input_ids, positions, query_start, seq_lens = inputs
    row = tl.program_id(0)
    every = tl.arange(0, ROWS)
    counts = tl.load(rows + 2 * batch + every, mask=every < batch, other=0)
    end = tl.sum(tl.where(every <= row, counts, 0))
    count = tl.sum(tl.where(every == row, counts, 0))
    real = row < batch
    slot = tl.load(rows + row, mask=real, other=0).to(tl.int64)
    computed = tl.load(rows + batch + row, mask=real, other=0)
    lanes = tl.arange(0, BLOCK)
    if FIRST:
        # the program after the last row fills padding and has no row
        tl.store(query_start + row + 1, end, mask=real)
        tl.store(seq_lens + row, computed + count, mask=real)
    num_blocks = tl.minimum((computed + count + BLOCK_SIZE - 1) // BLOCK_SIZE, max_blocks)
    for first in range(0, num_blocks, BLOCK):
        block = first + lanes
        ids = tl.load(table + slot * stride_table + block, mask=block < num_blocks)
        tl.store(own_table + row.to(tl.int64) * stride_own + block, ids, mask=block < num_blocks)
    for first in range(0, count, BLOCK):
        lane = first + lanes
        kept = lane < count
        position = computed + lane
        place = end - count + lane
        block = tl.load(table + slot * stride_table + position // BLOCK_SIZE, mask=kept, other=0).to(tl.int64)
        tl.store(slot_mapping + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=kept)
        if FIRST:
            tl.store(positions + place, position.to(tl.int64), mask=kept)
            tl.store(input_ids + place, tl.load(token_ids + slot * stride_ids + position, mask=kept), mask=kept)
    if row == batch:
        for first in range(end, padded_tokens, BLOCK):
            place = first + lanes
            kept = place < padded_tokens
            tl.store(slot_mapping + place, tl.full([BLOCK], -1, tl.int64), mask=kept)
            if FIRST:
                tl.store(positions + place, tl.zeros([BLOCK], tl.int64), mask=kept)
                tl.store(input_ids + place, tl.zeros([BLOCK], tl.int32), mask=kept)


def build_inputs(buffers: Any, token_ids: Tensor, tables: Any, rows: Tensor, sizes: Any) -> None:
    """As `frame.core.ops.step.build_inputs`; one launch per KV group, `rows` [3, B] contiguous."""
    batch = rows.shape[1]
    for group, (table, own, mapping) in enumerate(zip(tables, buffers.tables, buffers.slot_mapping, strict=True)):
        _build_inputs[(batch + 1,)](
            rows, token_ids, token_ids.stride(0), (table, table.stride(0), own, own.stride(0)),
            (buffers.input_ids, buffers.positions, buffers.query_start, buffers.seq_lens), mapping,
            batch, sizes.padded_tokens, sizes.max_blocks[group],
            BLOCK_SIZE=sizes.block_sizes[group], ROWS=triton.next_power_of_2(max(len(buffers.seq_lens), 64)),
            BLOCK=_BLOCK, FIRST=group == 0,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths", "values"])
def _write_rows(table, slots, starts, lengths, values, stride, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    every = tl.arange(0, BLOCK)
    before = tl.zeros([], tl.int32)
    for first in range(0, run, BLOCK):
        before += tl.sum(tl.load(lengths + first + every, mask=first + every < run, other=0))
    slot = tl.load(slots + run).to(tl.int64)
    start = tl.load(starts + run)
    length = tl.load(lengths + run)
    for first in range(0, length, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        kept = lane < length
        tl.store(table + slot * stride + start + lane, tl.load(values + before + lane, mask=kept), mask=kept)


def write_rows(table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
    """As `frame.core.ops.step.write_rows`; runs must not overlap."""
    runs = slots.shape[0]
    if runs:
        _write_rows[(runs,)](table, slots, starts, lengths, values, table.stride(0), BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["vector", "slots", "values"])
def _write_values(vector, slots, values, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + entry, mask=entry < count, other=-1).to(tl.int64)
    value = tl.load(values + entry, mask=slot >= 0, other=0)
    tl.store(vector + slot, value.to(vector.dtype.element_ty), mask=slot >= 0)


def write_values(vector: Tensor, slots: Tensor, values: Tensor) -> None:
    """As `frame.core.ops.step.write_values`."""
    if count := slots.shape[0]:
        _write_values[(triton.cdiv(count, 128),)](vector, slots, values, count, BLOCK=128)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["slots", "lengths", "sampled"])
def _advance(token_ids, slots, lengths, sampled, batch, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = row < batch
    token = tl.load(sampled + row, mask=kept, other=-1)
    slot = tl.load(slots + row, mask=kept, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=kept, other=0)
    tl.store(token_ids + slot * stride + length, token, mask=kept & (token >= 0) & (length > 0) & (slot >= 0))


def advance(token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """As `frame.core.ops.step.advance`."""
    batch = slots.shape[0]
    _advance[(triton.cdiv(batch, 128),)](token_ids, slots, lengths, sampled, batch, token_ids.stride(0), BLOCK=128)
