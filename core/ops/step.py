"""The runner's device work: staged writes into request state, inputs of a step, and what a step changes.

R slots, B rows of the batch, T tokens; row i of the batch is slot `slots[i]`.
"""

from __future__ import annotations

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


def build_inputs(
    token_ids: Tensor, slots: Tensor, num_computed: Tensor, num_scheduled: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input ids int32 [T], positions int64 [T], query_start int32 [B+1], seq_lens int32 [B]) of a step.

    `token_ids` [R, max_len] holds every known token of each slot, `num_computed` [B] how many are in the cache. Row i
    takes `num_scheduled[i]` tokens from there on. `num_tokens` is their sum.
    """
    counts = num_scheduled.long()
    ends = counts.cumsum(0)
    query_start = torch.zeros(len(slots) + 1, dtype=torch.int32, device=slots.device)
    query_start[1:] = ends
    row = torch.repeat_interleave(torch.arange(len(slots), device=slots.device), counts, output_size=num_tokens)
    within = torch.arange(num_tokens, device=slots.device) - (ends - counts)[row]
    positions = num_computed.long()[row] + within
    input_ids = token_ids[slots.long()[row], positions]
    return input_ids, positions, query_start, num_computed.int() + num_scheduled.int()


def slot_mapping(block_table: Tensor, query_start: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """int64 [T]: where each token's key and value go; `block_table` [B, max_blocks] of the batch's rows."""
    counts = (query_start[1:] - query_start[:-1]).long()
    row = torch.repeat_interleave(
        torch.arange(len(counts), device=positions.device), counts, output_size=positions.shape[0]
    )
    return block_table[row, positions // block_size].long() * block_size + positions % block_size


def advance(token_ids: Tensor, slots: Tensor, lengths: Tensor, sampled: Tensor) -> None:
    """Appends `sampled` [B] at token_ids[slots[i], lengths[i]], so that the next step reads them on the device.

    Rows whose sampled id is negative (an unfinished prefill) are left alone.
    """
    kept = sampled >= 0
    token_ids[slots.long()[kept], lengths.long()[kept]] = sampled[kept].to(token_ids.dtype)
