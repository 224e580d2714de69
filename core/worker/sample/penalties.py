"""Token counts of the requests that have penalties, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...interfaces.step import NewRequest
from ..device import Device
from .draws import Ahead
from .need import Need
from .shards import Part


@dataclass(frozen=True)
class PenalizedRows:
    """The n penalised rows of a batch, int64 [n] each, and their factors [n], None where all are neutral.

    `places` are rows of the batch and `tables` their rows of the counts; `rows` and `counted` are the same numbers, but
    -1 in padding rows, which ops skip.
    """

    places: Tensor
    tables: Tensor
    rows: Tensor
    counted: Tensor
    factors: list[Tensor | None]


class Penalties:
    """Token counts and penalty factors by slot.

    They are of the ids of `part`, and so are the logits that are penalised. Memory is 5 bytes for each id of the part
    and penalised request at once: nothing before the first one, doubled when full.
    """

    def __init__(self, device: Device, max_slots: int, part: Part) -> None:
        self._device = device
        self._part = part
        self._in_prompt = device.zeros(0, part.size, dtype=torch.bool)
        self._counts = device.zeros(0, part.size, dtype=torch.int32)
        self._row = np.full(max_slots, -1, np.int64)
        self._factors = np.zeros((3, max_slots), np.float32)
        self._free: list[int] = []
        self._pending: dict[int, NewRequest] = {}

    def add(self, request: NewRequest) -> Need:
        """Takes a request if its parameters penalise anything.

        Tokens after the prompt count as output: a preempted request that returns has some.
        """
        params, slot = request.params, request.slot
        self.remove(slot)
        if params.repetition_penalty == 1 and params.frequency_penalty == 0 and params.presence_penalty == 0:
            return Need(0)
        if not self._free:
            self._grow()
        self._row[slot] = self._free.pop()
        self._factors[:, slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._pending[slot] = request
        return Need.PENALTIES

    def remove(self, slot: int) -> None:
        """Frees the slot's counts, if it has any."""
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1
            self._pending.pop(slot, None)

    def apply_staged_writes(self) -> None:
        """Counts the tokens of the requests added since the last call."""
        if not self._pending:
            return
        rows = self._row[list(self._pending)]
        prompts = self._tokens(rows, [request.token_ids[: request.prompt_len] for request in self._pending.values()])
        outputs = self._tokens(rows, [request.token_ids[request.prompt_len :] for request in self._pending.values()])
        staged = self._device.stage_padded("rows", rows)
        self._in_prompt.index_fill_(0, staged, False)
        self._counts.index_fill_(0, staged, 0)
        if prompts.size:
            self._in_prompt[tuple(self._device.stage_padded("values", prompts))] = True
        if outputs.size:
            self._device.ops.count_tokens(self._counts, *self._device.stage_padded("values", outputs, -1))
        self._pending.clear()

    def batch(self, slots: np.ndarray, rows: np.ndarray) -> PenalizedRows:
        """The penalised `rows` of a batch whose row i is of slot `slots[i]`."""
        chosen = self._factors[:, slots[rows]]
        factors = [
            self._device.stage_padded("rows", values) if (values != neutral).any() else None
            for values, neutral in zip(chosen, (1, 0, 0), strict=True)
        ]
        return PenalizedRows(*self._index(slots, rows), factors)

    def apply(self, logits: Tensor, batch: PenalizedRows, ahead: Ahead | None = None) -> None:
        """Penalises the batch's rows in `logits`. Drafts `ahead` of a row count as output for it alone."""
        seen = self._counts.index_select(0, batch.tables)
        if ahead is not None:
            ahead.add_counts(seen, batch.places, self._part)
        in_prompt = self._in_prompt.index_select(0, batch.tables)
        self._device.ops.penalize(logits, batch.rows, in_prompt, seen, *batch.factors)

    def count(self, token_ids: Tensor, batch: PenalizedRows) -> None:
        """Counts the tokens int32 [N] just drawn for the penalised rows."""
        columns = self._part.columns(token_ids.index_select(0, batch.places))
        self._device.ops.count_tokens(self._counts, batch.counted, columns)

    def count_several(self, token_ids: Tensor, slots: np.ndarray) -> None:
        """Counts the tokens int32 [S, n] that slots [S] got; entries of -1 are skipped."""
        chosen = np.flatnonzero(self._row[slots] >= 0)
        if len(chosen):
            places, _, _, counted = self._index(slots, chosen)
            rows = counted.repeat_interleave(token_ids.shape[1])
            columns = self._part.columns(token_ids.index_select(0, places).flatten())
            self._device.ops.count_tokens(self._counts, rows, columns)

    def _index(self, slots: np.ndarray, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first four fields of `PenalizedRows`."""
        numbers = np.stack((rows, self._row[slots[rows]]))
        places, tables = self._device.stage_padded("rows", numbers)
        if len(places) == len(rows):
            return places, tables, places, tables
        return places, tables, *self._device.stage_padded("rows", numbers, -1)

    def _tokens(self, rows: np.ndarray, tokens: Sequence[np.ndarray]) -> np.ndarray:
        """int64 [2, n]: row and column in the counts of the part's ids among `tokens`, a list for each of `rows`."""
        owners = np.repeat(rows, [len(some) for some in tokens])
        token_ids = np.concatenate(tokens).astype(np.int64)
        kept = self._part.has(token_ids)
        return np.stack((owners[kept], token_ids[kept] - self._part.start))

    def _grow(self) -> None:
        old = len(self._counts)
        more = self._device.pad("rows", 2 * old or 1, len(self._row)) - old
        self._free.extend(range(old, old + more))
        for name in ("_in_prompt", "_counts"):
            table = getattr(self, name)
            setattr(self, name, torch.cat([table, table.new_zeros((more, table.shape[1]))]))
