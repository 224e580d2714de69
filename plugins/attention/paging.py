"""The torch backend's plan: which cache slots every row of a step reads, computed once and shared by all layers.

Runs on the host with numpy, then moves index tensors to the device. Knows no weights and no values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.attention import AttentionBatch

#: Queries of a prompt are attended in tiles of this many, so that no mask is larger than this times the context.
TILE = 256
#: Rows are padded to one length only while that gathers fewer extra bytes of keys and values than one more
#: launch of gather and attention costs (about 50 µs on one core).
MAX_PADDED_BYTES = 384 << 10


@dataclass
class DecodeGroup:
    """n rows of one query token each and of similar length, padded to `length` keys and attended in one call.

    `tokens` int64 [n] are their places in the batch, None when they are all of it in order. `slots` [n * length]
    name the cached tokens; past its own end a row repeats its last one, and `mask` [n, 1, 1, length] hides it
    (None when no row is padded). `distance` like `mask`: key position - query position.
    """

    tokens: Tensor | None
    slots: Tensor
    count: int
    length: int
    mask: Tensor | None
    distance: Tensor


@dataclass(frozen=True)
class Tile:
    """Queries [`first`, `last`) of the batch against keys [`key_first`, `key_last`) of their row.

    `offset` is the position of the first query, counted from the first key.
    """

    first: int
    last: int
    key_first: int
    key_last: int
    offset: int


@dataclass
class PromptRow:
    """A row of several query tokens [`start`, `end`).

    `slots` name its cached tokens; None when the row has nothing else in the cache, so that the step's own keys serve.
    """

    start: int
    end: int
    slots: Tensor | None
    tiles: list[Tile]


@dataclass
class StepRows:
    """The host's view of a batch: the rows that have tokens, and where those are."""

    starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    table: np.ndarray
    num_tokens: int

    @classmethod
    def of(cls, batch: AttentionBatch) -> StepRows:
        """Reads the batch; on a device other than the CPU this waits for it."""
        query_lens = batch.host_query_lens.astype(np.int64)
        starts = np.cumsum(query_lens) - query_lens
        seq_lens = batch.seq_lens.cpu().numpy().astype(np.int64)
        return cls(starts, query_lens, seq_lens, batch.block_table.cpu().numpy(), batch.num_tokens)


def row_slots(table: np.ndarray, first: np.ndarray, last: np.ndarray, block_size: int) -> np.ndarray:
    """int64 [n, max(last - first)]: cache slots of positions first[i] .. last[i]; a shorter row repeats its last one.

    `table` [n, max_blocks] is the block table of these rows.
    """
    length = int((last - first).max())
    if first.any() or block_size == 1:
        positions = np.minimum(first[:, None] + np.arange(length), last[:, None] - 1)
        blocks = np.take_along_axis(table, positions // block_size, axis=1).astype(np.int64)
        places: np.ndarray = blocks * block_size + positions % block_size
        return places
    num_blocks = -(-length // block_size)
    blocks = table[:, :num_blocks].astype(np.int64) * block_size
    slots: np.ndarray = (blocks[:, :, None] + np.arange(block_size)).reshape(len(table), -1)[:, :length]
    if int(last.min()) == length:
        return slots
    rows = np.arange(len(table))
    return np.where(np.arange(length) < last[:, None], slots, slots[rows, last - 1][:, None])


def buckets(lengths: np.ndarray, token_bytes: int) -> list[np.ndarray]:
    """Indices of `lengths` in groups of similar length, so that padding stays cheaper than one more launch."""
    if not len(lengths):
        return []
    budget = MAX_PADDED_BYTES // token_bytes
    if int(lengths.max()) * len(lengths) - int(lengths.sum()) <= budget:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups, start, padded = [], 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        padded += int(lengths[order[start]]) - length
        if padded > budget:
            groups.append(order[start:place])
            start, padded = place, 0
    groups.append(order[start:])
    return groups


def decode_group(rows: StepRows, chosen: np.ndarray, window: int, block_size: int, like: Tensor) -> DecodeGroup:
    """The group of the rows `chosen`; tensors get `like`'s device, the mask its dtype."""
    last = rows.seq_lens[chosen]
    first = np.maximum(last - window, 0) if window else np.zeros_like(last)
    slots = row_slots(rows.table[chosen], first, last, block_size)
    count, length = slots.shape
    device = like.device
    tokens = rows.starts[chosen]
    whole = count == rows.num_tokens and bool((tokens == np.arange(count)).all())
    counts = torch.from_numpy(last - first).to(device)
    distance = (torch.arange(length, device=device) - counts[:, None] + 1).view(count, 1, 1, length)
    mask = None
    if int((last - first).min()) < length:
        mask = torch.zeros(distance.shape, dtype=like.dtype, device=device).masked_fill_(distance > 0, float("-inf"))
    return DecodeGroup(
        None if whole else torch.from_numpy(tokens).to(device),
        torch.from_numpy(slots.reshape(-1)).to(device),
        count,
        length,
        mask,
        distance,
    )


def prompt_row(
    rows: StepRows, row: int, window: int, block_size: int, from_cache: bool, device: torch.device
) -> PromptRow:
    """Row `row` cut into tiles of queries; each reads the keys from its first query's window to its last query.

    `from_cache` reads also this step's keys back from the cache.
    """
    start, count, length = int(rows.starts[row]), int(rows.query_lens[row]), int(rows.seq_lens[row])
    cached = length - count
    first = max(0, cached - window + 1) if window else 0
    slots = None
    if cached or from_cache:
        table = rows.table[row : row + 1]
        found = row_slots(table, np.array([first]), np.array([length]), block_size)
        slots = torch.from_numpy(found.reshape(-1)).to(device)
    tiles = []
    for place in range(0, count, TILE):
        end = min(place + TILE, count)
        position = cached + place
        key_first = max(first, position - window + 1) if window else first
        tiles.append(Tile(start + place, start + end, key_first - first, cached + end - first, position - key_first))
    return PromptRow(start, start + count, slots, tiles)
