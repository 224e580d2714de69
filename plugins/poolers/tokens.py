"""Poolers that give a prompt a row for each of its tokens, or for some."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Pooler, PoolerRows, PoolerSetup


class AllPooler(Pooler):
    """Every token's hidden state."""

    per_token: ClassVar[bool] = True

    def __init__(self, setup: PoolerSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._chunks: dict[int, list[Tensor]] = {}

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        del token_ids
        self._chunks[slot] = []

    def remove(self, slot: int) -> None:
        self._chunks.pop(slot, None)

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        if rows.whole and int(rows.counts.sum()) == len(hidden):
            return hidden, rows.counts.tolist()
        found: list[Tensor] = []
        counts: list[int] = []
        parts = zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), rows.last.tolist(), strict=True)
        for slot, start, count, last in parts:
            chunks = self._chunks.setdefault(slot, [])
            chunks.append(hidden[start : start + count].clone())  # `hidden` is used again by the next step
            if last:
                found += chunks
                counts.append(sum(map(len, chunks)))
                self._chunks[slot] = []
        return (torch.cat(found) if found else hidden[:0]), counts


class StepPooler(AllPooler):
    """The hidden states of tokens with the id `step_tag_id`: process reward models score steps there.

    Without that setting, every token's.
    """

    def __init__(self, setup: PoolerSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._tag = setup.step_tag_id
        self._places: dict[int, np.ndarray] = {}

    def add(self, slot: int, token_ids: np.ndarray) -> None:
        super().add(slot, token_ids)
        self._places[slot] = np.flatnonzero(token_ids == self._tag) if self._tag is not None else token_ids[:0]

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        found, counts = super().pool(hidden, rows)
        if self._tag is None:
            return found, counts
        places = [self._places[slot] for slot in rows.slots[rows.last].tolist()]
        starts = np.cumsum(counts) - counts
        chosen = [start + place for start, place in zip(starts, places, strict=True)]
        index = np.concatenate(chosen) if chosen else np.zeros(0)
        return found.index_select(0, self.stage(index.astype(np.int64))), [len(place) for place in places]
