"""Sampling parameters of every slot, on the host, and the part of them that one batch needs on the device.

A batch's part is built when its composition changes and kept while it does not, so that a steady batch costs one
comparison. Knows no logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import torch
from torch import Tensor

from ...interfaces.platform import Streams
from ...interfaces.step import NewRequest
from ...ops.random import seed_stream

#: Asked-for numbers of log-probabilities up to this are computed together; larger ones apart from them.
NARROW_LOGPROBS = 32


class Need(IntFlag):
    """What a request needs beyond the argmax of its logits."""

    RANDOM = 1
    FILTER = 2
    LOGPROBS = 4
    PENALTIES = 8
    RULES = 16
    TAILS = 32
    PROCESSORS = 64
    INVARIANT_PROCESSORS = 128


# numbers: a flag costs more to combine than what it stands for, in each step
#: What changes logits before the draw.
EDITS = int(Need.PENALTIES | Need.RULES | Need.TAILS | Need.PROCESSORS)

#: All but a temperature.
MORE = ~int(Need.RANDOM)

#: What works on one row of a slot at a time.
ONE_ROW = int(Need.PROCESSORS | Need.INVARIANT_PROCESSORS)


@dataclass(frozen=True)
class DrawParameters:
    """What `Ops.draw` takes, one value a row of the batch, on the device; None where no row filters."""

    temperature: Tensor
    streams: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def filters(self, index: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(top_k, top_p, min_p), of the rows `index` or of all."""
        if index is None:
            return self.top_k, self.top_p, self.min_p
        chosen = (None if values is None else values.index_select(0, index) for values in self.filters())
        return next(chosen), next(chosen), next(chosen)


@dataclass(frozen=True)
class LogprobGroup:
    """Rows of a batch whose log-probabilities are computed together.

    `index` the rows on the device, `rows` and `counts` (k of each) on the host, `width` the largest k.
    """

    index: Tensor
    rows: np.ndarray
    counts: np.ndarray
    width: int


@dataclass(frozen=True)
class BatchParameters:
    """The sampling parameters of one batch composition. `draw` is None when every row is greedy."""

    key: tuple[int, bytes]
    needs: np.ndarray
    need: int
    draw: DrawParameters | None
    logprobs: list[LogprobGroup]


class SamplingSlots:
    """Parameters by slot. `version` grows whenever a slot changes.

    `heat` and `heat_streams` [max_slots] are, on the device, temperature and stream by row of the newest random batch.
    """

    def __init__(self, max_slots: int, vocab_size: int, streams: Streams, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.version = 0
        rows = max_slots + 1  # the last, -1, is nobody's: rows that fill up a batch ask for nothing
        self.needs = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.streams = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int32)
        self.heat = torch.zeros(max_slots, dtype=torch.float32, device=device)
        self.heat_streams = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._streams = streams
        self._batch: BatchParameters | None = None

    def add(self, request: NewRequest, needs: Need) -> None:
        """Sets every field of the request's slot; `needs` are those that the parameters here do not tell."""
        params, slot = request.params, request.slot
        self.version += 1
        greedy = params.greedy
        self.temperature[slot] = 0.0 if greedy else params.temperature
        self.top_k[slot] = 0 if greedy or params.top_k >= self.vocab_size else max(params.top_k, 0)
        self.top_p[slot] = 1.0 if greedy else params.top_p
        self.min_p[slot] = 0.0 if greedy else params.min_p
        self.streams[slot] = seed_stream(request.seed)
        wanted = params.logprobs
        self.logprobs[slot] = -1 if wanted is None else self.vocab_size if wanted < 0 else min(wanted, self.vocab_size)
        if not greedy:
            needs |= Need.RANDOM
        if self.top_k[slot] > 0 or self.top_p[slot] < 1 or self.min_p[slot] > 0:
            needs |= Need.FILTER
        if wanted is not None:
            needs |= Need.LOGPROBS
        self.needs[slot] = needs

    def remove(self, slot: int) -> None:
        """Sets every field of the slot to what asks for nothing."""
        self.version += 1
        self.needs[slot] = self.temperature[slot] = self.top_k[slot] = self.min_p[slot] = self.streams[slot] = 0
        self.top_p[slot] = 1.0
        self.logprobs[slot] = -1

    def batch(self, slots: np.ndarray) -> BatchParameters:
        """The parameters of the batch whose rows are `slots` int32 [N]."""
        key = (self.version, slots.tobytes())
        if self._batch is None or self._batch.key != key:
            needs = self.needs[slots]
            need = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
            self._batch = BatchParameters(
                key=key,
                needs=needs,
                need=need,
                draw=self._draw_parameters(slots) if need & Need.RANDOM else None,
                logprobs=self._logprob_groups(slots) if need & Need.LOGPROBS else [],
            )
        return self._batch

    def _draw_parameters(self, slots: np.ndarray) -> DrawParameters:
        stage = self._streams.stage
        top_k, top_p, min_p = self.top_k[slots], self.top_p[slots], self.min_p[slots]
        return DrawParameters(
            temperature=self._staged(self.heat, self.temperature[slots]),
            streams=self._staged(self.heat_streams, self.streams[slots]),
            top_k=stage(top_k) if top_k.any() else None,
            top_p=stage(top_p) if (top_p < 1).any() else None,
            min_p=stage(min_p) if min_p.any() else None,
        )

    def _staged(self, memory: Tensor, values: np.ndarray) -> Tensor:
        """The values at the beginning of `memory`, or elsewhere where a slot has several rows and they do not fit."""
        count = len(values)
        if count > len(memory):
            return self._streams.stage(values)
        self._streams.stage_into(memory[:count], values)
        return memory[:count]

    def _logprob_groups(self, slots: np.ndarray) -> list[LogprobGroup]:
        counts = self.logprobs[slots]
        groups = []
        for chosen in ((counts >= 0) & (counts <= NARROW_LOGPROBS), counts > NARROW_LOGPROBS):
            rows = np.flatnonzero(chosen)
            if len(rows):
                wanted = counts[rows]
                groups.append(LogprobGroup(self._streams.stage(rows), rows, wanted, int(wanted.max())))
        return groups
