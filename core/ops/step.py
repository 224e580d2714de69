"""The runner's device work: staged writes into request state, inputs of a step, and what a step changes.

R slots, B rows of the batch, T tokens; row i of the batch is slot `slots[i]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def write_rows(table: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, values: Tensor) -> None:
    """table[slots[i], starts[i] : starts[i] + lengths[i]] = the i-th run of `values` (runs concatenated).

    `table` [R, width]; later runs win where runs overlap.
    """
    count = lengths.long()
    rows = torch.repeat_interleave(slots.long(), count)
    ends = count.cumsum(0)
    within = torch.arange(values.shape[0], device=values.device) - torch.repeat_interleave(ends - count, count)
    columns = torch.repeat_interleave(starts.long(), count) + within
    table[rows, columns] = values.to(table.dtype)


def write_values(vector: Tensor, slots: Tensor, values: Tensor) -> None:
    """vector[slots[i]] = values[i]; `slots` are distinct."""
    vector[slots.long()] = values.to(vector.dtype)


@dataclass(frozen=True)
class StepBuffers:
    """Inputs of a step, at addresses that never change, so that recorded graphs may read them.

    For at most T tokens of R rows: `input_ids` int32 [T], `positions` int64 [T], `query_start` int32 [R+1], `seq_lens`
    int32 [R]; per KV group `tables` int32 [R, max_blocks] and `slot_mapping` int64 [T].
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    tables: tuple[Tensor, ...]
    slot_mapping: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls, max_tokens: int, max_rows: int, max_blocks: int, num_groups: int, device: torch.device
    ) -> StepBuffers:
        """Zeroed buffers on `device`."""
        groups = range(num_groups)
        return cls(
            torch.zeros(max_tokens, dtype=torch.int32, device=device),
            torch.zeros(max_tokens, dtype=torch.int64, device=device),
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
            tuple(torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device) for _ in groups),
            tuple(torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in groups),
        )


@dataclass(frozen=True)
class StepSizes:
    """What the host knows of a step. Tokens and rows past the real ones are padding up to the padded sizes.

    `max_blocks` is the most blocks that a row's tokens span, `block_size` the tokens in a block.
    """

    num_tokens: int
    padded_tokens: int
    padded_rows: int
    max_blocks: int
    block_size: int


def build_inputs(
    buffers: StepBuffers, token_ids: Tensor, tables: Sequence[Tensor], rows: Tensor, sizes: StepSizes
) -> None:
    """Fills the buffers for a step of B rows; `rows` int32 [3, B] are slots, tokens computed, tokens scheduled.

    `token_ids` [R, max_len] holds every known token of each slot and `tables[g]` [R, max_blocks] its blocks. Row i
    takes its scheduled tokens from the computed ones on. Padding tokens have id 0, position 0 and slot -1; padding
    rows have no tokens and length 0.
    """
    slots, computed, counts = rows.long().unbind(0)
    batch, num_tokens = rows.shape[1], sizes.num_tokens
    ends = counts.cumsum(0)
    row = torch.repeat_interleave(torch.arange(batch, device=rows.device), counts, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=rows.device) + (computed - ends + counts)[row]
    buffers.positions[:num_tokens] = positions
    buffers.input_ids[:num_tokens] = token_ids[slots[row], positions]
    buffers.query_start[1 : batch + 1] = ends
    buffers.seq_lens[:batch] = computed + counts
    for table, own, mapping in zip(tables, buffers.tables, buffers.slot_mapping, strict=True):
        found = table[:, : sizes.max_blocks].index_select(0, slots)
        own[:batch, : sizes.max_blocks] = found
        block = found[row, positions // sizes.block_size].long()
        mapping[:num_tokens] = block * sizes.block_size + positions % sizes.block_size
        mapping[num_tokens : sizes.padded_tokens] = -1
    if sizes.padded_tokens > num_tokens:
        buffers.positions[num_tokens : sizes.padded_tokens] = 0
        buffers.input_ids[num_tokens : sizes.padded_tokens] = 0
    if sizes.padded_rows > batch:
        buffers.query_start[batch + 1 : sizes.padded_rows + 1] = num_tokens
        buffers.seq_lens[batch : sizes.padded_rows] = 0


def advance(token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """Appends `sampled` [B] at token_ids[slots[i], lengths[i]], so that the next step reads them on the device.

    Rows whose sampled id is negative (an unfinished prefill) are left alone.
    """
    kept = sampled >= 0
    token_ids[slots.long()[kept], lengths.long()[kept]] = sampled[kept].to(token_ids.dtype)
