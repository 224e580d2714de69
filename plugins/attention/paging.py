"""The torch backend's plan: which cache slots every row of a step reads, computed once and shared by all layers.

Runs on the host with numpy, then moves index tensors to the device. Knows no weights and no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import AttentionSpec, GroupBatch

#: Queries of a prompt are attended in tiles of this many, so that no mask is larger than this times the context.
TILE = 256
#: Rows are padded to one length only while that gathers fewer extra bytes of keys and values than one more
#: launch of gather and attention costs (about 50 µs on one core).
MAX_PADDED_BYTES = 384 << 10


class CachedTokens:
    """Which slots of the cache are read: a run of `length` from `start` on, or else (`start` None) those in `slots`."""

    def __init__(self, length: int, start: int | None, device: torch.device, listed: np.ndarray | None = None) -> None:
        self.length = length
        self.start = start
        self._device = device
        self._listed = listed

    @cached_property
    def slots(self) -> Tensor:
        """int64 [length]; computed at first use, since a run can usually be read as a slice."""
        if self._listed is None:
            first = self.start or 0
            return torch.arange(first, first + self.length, device=self._device)
        return torch.from_numpy(self._listed).to(self._device)

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> CachedTokens:
        """From int64 [n] on the host."""
        flat = slots.reshape(-1)
        length, start = len(flat), int(flat[0])
        run = int(flat[-1]) - start == length - 1 and bool((flat[1:] > flat[:-1]).all())
        return cls(length, start if run else None, device, None if run else flat)

    @classmethod
    def of_row(cls, table: np.ndarray, first: int, last: int, block_size: int, device: torch.device) -> CachedTokens:
        """Positions `first` .. `last` - 1 of the row with block table `table`; looks at blocks instead of tokens."""
        skipped = first // block_size
        blocks = table[skipped : -(-last // block_size)].astype(np.int64)
        offset, length, block = first - skipped * block_size, last - first, int(blocks[0])
        if np.array_equal(blocks, np.arange(block, block + len(blocks))):
            start = block * block_size + offset
            return cls(length, start, device)
        slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[offset : offset + length]
        return cls(length, None, device, slots)


@dataclass
class DecodeGroup:
    """`count` rows of one query token each and of similar length, padded to `length` keys and attended in one call.

    `tokens` int64 [count] are their places in the batch, `whole` says that they are all of it in order. `cached` names
    count · length tokens; past its own end a row repeats its last one, and `mask` [count, 1, 1, length] hides it (None
    when no row is padded). `distance` like `mask`: key position - query position, where scores depend on it.
    """

    tokens: Tensor
    whole: bool
    cached: CachedTokens
    count: int
    length: int
    mask: Tensor | None
    distance: Tensor | None


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

    `cached` names its tokens in the cache; None when the step's own keys are all there is. Without `tiles` the whole
    row is one call, `causal` or over all keys.
    """

    start: int
    end: int
    cached: CachedTokens | None
    tiles: list[Tile]
    causal: bool = True


@dataclass
class StepRows:
    """The host's view of a batch: the rows that have tokens, and where those are."""

    starts: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    table: np.ndarray
    num_tokens: int
    device: torch.device

    @classmethod
    def of(cls, batch: GroupBatch) -> StepRows:
        """Reads the batch on the host; on a device other than the CPU this waits for the device."""
        query_lens = batch.host_query_lens
        starts = query_lens.cumsum(dtype=np.int64) - query_lens
        table = batch.block_table.cpu().numpy()
        seq_lens = batch.seq_lens.cpu().numpy()
        return cls(starts, query_lens, seq_lens, table, batch.num_tokens, batch.block_table.device)

    @property
    def all_decode(self) -> bool:
        """Whether every row has exactly one token; tokens without a row (padding) rule it out."""
        return len(self.query_lens) == self.num_tokens == np.count_nonzero(self.query_lens)


def row_slots(table: np.ndarray, first: np.ndarray, last: np.ndarray, block_size: int) -> np.ndarray:
    """int64 [n, max(last - first)]: cache slots of positions first[i] .. last[i]; a shorter row repeats its last one.

    `table` [n, max_blocks] is the block table of these rows.
    """
    length = int((last - first).max())
    if block_size == 1 or first.any():
        positions = np.minimum(first[:, None] + np.arange(length), last[:, None] - 1)
        blocks = np.take_along_axis(table, positions // block_size, axis=1).astype(np.int64)
        places: np.ndarray = blocks * block_size + positions % block_size
        return places
    num_blocks = -(-length // block_size)
    blocks = table[:, :num_blocks].astype(np.int64)
    blocks *= block_size
    slots: np.ndarray = (blocks[:, :, None] + np.arange(block_size)).reshape(len(table), -1)[:, :length]
    if len(table) == 1 or int(last.min()) == length:
        return slots
    rows = np.arange(len(table))
    return np.where(np.arange(length) < last[:, None], slots, slots[rows, last - 1][:, None])


def buckets(lengths: np.ndarray, token_bytes: int) -> list[np.ndarray]:
    """Indices of `lengths` in groups of similar length, so that padding stays cheaper than one more launch."""
    if len(lengths) < 2:
        return [np.arange(len(lengths))] * len(lengths)
    budget = MAX_PADDED_BYTES // token_bytes
    if int(lengths.max()) * len(lengths) - int(lengths.sum()) <= budget:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    groups, start, longest, padded = [], 0, 0, 0
    for place, length in enumerate(lengths[order].tolist()):
        longest = longest or length
        padded += longest - length
        if padded > budget:
            groups.append(order[start:place])
            start, longest, padded = place, length, 0
    groups.append(order[start:])
    return groups


def needs_distances(spec: AttentionSpec) -> bool:
    """Whether scores depend on how far a key lies from its query."""
    return spec.alibi or spec.distances > 0


def decode_group(rows: StepRows, chosen: np.ndarray, spec: AttentionSpec) -> DecodeGroup:
    """The group of the rows `chosen`."""
    if len(chosen) == 1 and not needs_distances(spec):
        return _decode_alone(rows, int(chosen[0]), spec)
    last = rows.seq_lens[chosen]
    first = np.maximum(last - spec.window, 0) if spec.window else np.zeros(len(last), last.dtype)
    slots = row_slots(rows.table[chosen], first, last, spec.block_size)
    count, length = slots.shape
    tokens = rows.starts[chosen]
    whole = count == rows.num_tokens and bool((tokens == np.arange(count)).all())
    mask = distance = None
    lengths = last - first
    if int(lengths.min()) < length or needs_distances(spec):
        ahead = (np.arange(length) - lengths[:, None] + 1).reshape(count, 1, 1, length)
        distance = torch.from_numpy(ahead).to(rows.device)
        hidden = np.where(ahead > 0, np.float32("-inf"), np.float32(0))
        mask = torch.from_numpy(hidden).to(rows.device, spec.dtype)
    return DecodeGroup(
        torch.from_numpy(tokens).to(rows.device),
        whole,
        CachedTokens.of(slots, rows.device),
        count,
        length,
        mask,
        distance,
    )


def _decode_alone(rows: StepRows, row: int, spec: AttentionSpec) -> DecodeGroup:
    last = int(rows.seq_lens[row])
    first = max(last - spec.window, 0) if spec.window else 0
    cached = CachedTokens.of_row(rows.table[row], first, last, spec.block_size, rows.device)
    tokens = torch.from_numpy(rows.starts[row : row + 1]).to(rows.device)
    return DecodeGroup(tokens, rows.num_tokens == 1, cached, 1, last - first, None, None)


def prompt_row(rows: StepRows, row: int, spec: AttentionSpec) -> PromptRow:
    """Row `row` cut into tiles of queries; each reads the keys from its first query's window to its last query."""
    start, count, length = int(rows.starts[row]), int(rows.query_lens[row]), int(rows.seq_lens[row])
    window, position = spec.window, length - count
    first = max(0, position - window + 1) if window else 0
    cached = None
    if position or spec.dtype != spec.kv_dtype:
        cached = CachedTokens.of_row(rows.table[row], first, length, spec.block_size, rows.device)
    plain = not (spec.soft_cap or spec.sinks or needs_distances(spec))
    if plain and not position and not 0 < window < count:
        return PromptRow(start, start + count, cached, [])
    tiles = []
    for place in range(0, count, TILE):
        end, query = min(place + TILE, count), position + place
        key_first = max(first, query - window + 1) if window else first
        tiles.append(Tile(start + place, start + end, key_first - first, position + end - first, query - key_first))
    return PromptRow(start, start + count, cached, tiles)


def whole_row(rows: StepRows, row: int, spec: AttentionSpec) -> PromptRow:
    """Row `row`, each of whose queries reads all cached tokens of the row."""
    start, count, length = int(rows.starts[row]), int(rows.query_lens[row]), int(rows.seq_lens[row])
    cached = CachedTokens.of_row(rows.table[row], 0, length, spec.block_size, rows.device)
    return PromptRow(start, start + count, cached, [], causal=False)
