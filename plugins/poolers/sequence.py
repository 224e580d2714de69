"""Poolers that give a prompt one row."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Pooler, PoolerRows, PoolerSetup


class LastPooler(Pooler):
    """The hidden state of the last token, which has seen all others in a decoder."""

    needs_every_token: ClassVar[bool] = False

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        ends = (rows.starts + rows.counts - 1)[rows.last]
        return hidden.index_select(0, self.stage(ends.astype(np.int64))), [1] * len(ends)


class KeptRowPooler(Pooler):
    """Keeps a row for each slot, in float32, while a prompt arrives in several steps."""

    def __init__(self, setup: PoolerSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.kept = torch.zeros(setup.num_slots, setup.hidden_size, dtype=torch.float32, device=setup.device)


class ClsPooler(KeptRowPooler):
    """The hidden state of the first token, which encoders train to stand for the whole."""

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        first = rows.positions == 0
        found = hidden.index_select(0, self.stage(rows.starts[first].astype(np.int64)))
        if rows.whole:
            return found, [1] * len(found)
        self.kept.index_copy_(0, self.stage(rows.slots[first].astype(np.int64)), found.float())
        ended = rows.slots[rows.last]
        return self.kept.index_select(0, self.stage(ended.astype(np.int64))), [1] * len(ended)


class MeanPooler(KeptRowPooler):
    """The mean of all hidden states."""

    def pool(self, hidden: Tensor, rows: PoolerRows) -> tuple[Tensor, list[int]]:
        if int(rows.counts.sum()) < len(hidden):
            mine = [np.arange(start, start + count) for start, count in zip(rows.starts, rows.counts, strict=True)]
            hidden = hidden.index_select(0, self.stage(np.concatenate(mine).astype(np.int64)))
        sums = self.ops.sum_rows(hidden, self.stage(rows.counts.astype(np.int64)))
        lengths = self.stage((rows.positions + rows.counts)[rows.last].astype(np.float32)).unsqueeze(1)
        if rows.whole:
            return sums / lengths, [1] * len(lengths)
        slots = self.stage(rows.slots.astype(np.int64))
        begins = self.stage(rows.positions == 0).unsqueeze(1)
        # values of an earlier request in the slot may not be finite, so they are replaced and not multiplied by 0
        self.kept.index_copy_(0, slots, self.kept.index_select(0, slots).masked_fill(begins, 0) + sums)
        ended = self.stage(rows.slots[rows.last].astype(np.int64))
        return self.kept.index_select(0, ended) / lengths, [1] * len(lengths)
