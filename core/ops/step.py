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

    `table` [R, width]; runs must not overlap. Runs of length 0 (of slot -1 where they fill up) and values
    behind the last run are left alone.
    """
    count = lengths.long()
    rows = torch.repeat_interleave(slots.long(), count)
    ends = count.cumsum(0)
    within = torch.arange(rows.shape[0], device=values.device) - torch.repeat_interleave(ends - count, count)
    columns = torch.repeat_interleave(starts.long(), count) + within
    table[rows, columns] = values[: rows.shape[0]].to(table.dtype)


def write_values(vector: Tensor, slots: Tensor, values: Tensor) -> None:
    """vector[slots[i]] = values[i]; `slots` are distinct, but for those that are -1, which are left alone."""
    kept = slots >= 0
    vector[slots[kept].long()] = values[kept].to(vector.dtype)


@dataclass(frozen=True)
class StepBuffers:
    """Inputs of a step, at addresses that never change, so that captured graphs may read them.

    For at most T tokens of R rows: `input_ids` int32 [T], `positions` int64 [T], `query_start` int32 [R+1], `seq_lens`
    int32 [R]; per KV group `tables` int32 [R, most blocks] and `slot_mapping` int64 [T]. `rows` int32 [3 · R] is what
    `build_inputs` makes them of, the first 3 · B numbers for a step of B rows.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    tables: tuple[Tensor, ...]
    slot_mapping: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def allocate(cls, max_tokens: int, max_rows: int, max_blocks: Sequence[int], device: torch.device) -> StepBuffers:
        """Zeroed buffers on `device`; a row has at most `max_blocks[g]` blocks of group g."""
        return cls(
            torch.zeros(max_tokens, dtype=torch.int32, device=device),
            torch.zeros(max_tokens, dtype=torch.int64, device=device),
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
            tuple(torch.zeros((max_rows, width), dtype=torch.int32, device=device) for width in max_blocks),
            tuple(torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in max_blocks),
            torch.zeros(3 * max_rows, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class StepSizes:
    """What the host knows of a step. Tokens past the real ones are padding up to `padded_tokens`.

    By KV group: `max_blocks` is the most blocks that a row's tokens span, or more, `block_sizes` the tokens in a block.
    """

    padded_tokens: int
    max_blocks: Sequence[int]
    block_sizes: Sequence[int]


def build_inputs(
    buffers: StepBuffers, token_ids: Tensor, tables: Sequence[Tensor], rows: Tensor, sizes: StepSizes
) -> None:
    """Fills the buffers for a step of B rows; `rows` int32 [3, B] are slots, tokens computed, tokens scheduled.

    `token_ids` [R, max_len] holds every known token of each slot and `tables[g]` [R, blocks] its blocks. Row i
    takes its scheduled tokens from the computed ones on. Padding tokens have id 0, position 0 and slot -1; padding
    rows have neither computed nor scheduled tokens, and come last. Which rows those are is read on the device alone, so
    that a captured call serves other rows. Blocks past a row's tokens are unspecified.
    """
    slots, computed, counts = rows.long().unbind(0)
    batch = rows.shape[1]
    ends = counts.cumsum(0)
    place = torch.arange(sizes.padded_tokens, device=rows.device)
    real = place < ends[-1]
    row = torch.searchsorted(ends, place, right=True).clamp(max=batch - 1)
    positions = torch.where(real, place + (computed - ends + counts)[row], 0)
    buffers.positions[: sizes.padded_tokens] = positions
    buffers.input_ids[: sizes.padded_tokens] = torch.where(real, token_ids[slots[row], positions], 0)
    buffers.query_start[1 : batch + 1] = ends
    buffers.seq_lens[:batch] = computed + counts
    parts = zip(tables, buffers.tables, buffers.slot_mapping, sizes.max_blocks, sizes.block_sizes, strict=True)
    for table, own, mapping, width, size in parts:
        found = table[:, :width].index_select(0, slots)
        own[:batch, :width] = found
        block = found[row, positions // size].long()
        mapping[: sizes.padded_tokens] = torch.where(real, block * size + positions % size, -1)


def advance(token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """Appends `sampled` [B] at token_ids[slots[i], lengths[i]], so that the next step reads them on the device.

    Rows whose sampled id is negative (an unfinished prefill), whose length is 0 or whose slot is -1 (both padding) are
    left alone.
    """
    kept = (sampled >= 0) & (lengths > 0) & (slots >= 0)
    token_ids[slots.long()[kept], lengths.long()[kept]] = sampled[kept].to(token_ids.dtype)
