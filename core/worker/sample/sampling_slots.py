"""Sampling parameters of every slot, on the host, and the part of them that one batch needs on the device.

A batch's part is built when its composition changes and kept while it does not, so that a steady batch costs one
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...interfaces.step import NewRequest
from ...ops.random import seed_stream
from ..device import Device
from .draws import LogprobGroup
from .need import Need
from .penalties import PenalizedRows, Penalties
from .shards import Part
from .token_rules import BatchRules, TokenRules

#: Rows that ask for at most this many log-probabilities are computed together, the others in a second group.
NARROW_LOGPROBS = 32


@dataclass(frozen=True)
class DrawParameters:
    """What `Ops.draw` takes, one value a row of the batch, on the device; None where no row filters."""

    temperature: Tensor
    streams: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def of(self, index: Tensor) -> DrawParameters:
        """Those of the rows `index`."""
        temperature, streams = self.temperature.index_select(0, index), self.streams.index_select(0, index)
        return DrawParameters(temperature, streams, *self.filters(index))

    def filters(self, index: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(top_k, top_p, min_p), of the rows `index` or of all."""
        if index is None:
            return self.top_k, self.top_p, self.min_p
        chosen = (None if values is None else values.index_select(0, index) for values in self.filters())
        return next(chosen), next(chosen), next(chosen)


@dataclass(frozen=True)
class BatchParameters:
    """The sampling parameters of one batch composition. What no row of it asked for is None."""

    key: tuple[int, bytes]
    needs: np.ndarray
    need: int
    draw: DrawParameters | None
    logprobs: list[LogprobGroup]
    penalties: PenalizedRows | None
    rules: BatchRules | None


class SamplingSlots:
    """Parameters by slot. `version` grows whenever a slot changes.

    `temperatures` and `random_streams` [max_slots] hold, on the device, those of the newest random batch by its rows.
    """

    def __init__(self, device: Device, max_slots: int, part: Part) -> None:
        self.penalties = Penalties(device, max_slots, part)
        self.rules = TokenRules(device, max_slots, part)
        self.vocab_size = part.vocab_size
        self.version = 0
        rows = max_slots + 1  # the last, index -1, is that of padding rows, which ask for nothing
        self.needs = np.zeros(rows, np.int32)
        self.temperature = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int32)
        self.top_p = np.ones(rows, np.float32)
        self.min_p = np.zeros(rows, np.float32)
        self.streams = np.zeros(rows, np.int64)
        self.logprobs = np.full(rows, -1, np.int32)
        self.temperatures = device.zeros(max_slots, dtype=torch.float32)
        self.random_streams = device.zeros(max_slots, dtype=torch.int64)
        self._device = device
        self._batch: BatchParameters | None = None

    def add(self, request: NewRequest, needs: Need) -> None:
        """Sets every field of the request's slot; `needs` are those of its processors.

        Raises `ValueError` when its parameters name ids outside the vocabulary.
        """
        params, slot = request.params, request.slot
        needs |= self.rules.add(request) | self.penalties.add(request)
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
        self.rules.remove(slot)
        self.penalties.remove(slot)

    def apply_staged_writes(self) -> None:
        """Sends what the requests added since the last call need on the device."""
        self.rules.apply_staged_writes()
        self.penalties.apply_staged_writes()

    def batch(self, slots: np.ndarray) -> BatchParameters:
        """The parameters of the batch whose rows are `slots` int32 [N]."""
        key = (self.version, slots.tobytes())
        if self._batch is None or self._batch.key != key:
            needs = self.needs[slots]
            need = int(np.bitwise_or.reduce(needs)) if len(needs) else 0
            penalized = np.flatnonzero(needs & Need.PENALTIES)
            self._batch = BatchParameters(
                key=key,
                needs=needs,
                need=need,
                draw=self._draw_parameters(slots) if need & Need.RANDOM else None,
                logprobs=self._logprob_groups(slots) if need & Need.LOGPROBS else [],
                penalties=self.penalties.batch(slots, penalized) if need & Need.PENALTIES else None,
                rules=self.rules.batch(slots) if need & Need.RULES else None,
            )
        return self._batch

    def _draw_parameters(self, slots: np.ndarray) -> DrawParameters:
        stage = self._device.streams.stage
        top_k, top_p, min_p = self.top_k[slots], self.top_p[slots], self.min_p[slots]
        return DrawParameters(
            temperature=self._staged(self.temperatures, self.temperature[slots]),
            streams=self._staged(self.random_streams, self.streams[slots]),
            top_k=stage(top_k) if top_k.any() else None,
            top_p=stage(top_p) if (top_p < 1).any() else None,
            min_p=stage(min_p) if min_p.any() else None,
        )

    def _staged(self, memory: Tensor, values: np.ndarray) -> Tensor:
        """The values at the beginning of `memory`, or elsewhere where a slot has several rows and they do not fit."""
        count = len(values)
        if count > len(memory):
            return self._device.streams.stage(values)
        self._device.streams.stage_into(memory[:count], values)
        return memory[:count]

    def _logprob_groups(self, slots: np.ndarray) -> list[LogprobGroup]:
        counts = self.logprobs[slots]
        groups = []
        for chosen in ((counts >= 0) & (counts <= NARROW_LOGPROBS), counts > NARROW_LOGPROBS):
            rows = np.flatnonzero(chosen)
            if len(rows):
                index, width = self._device.stage_padded("rows", rows), int(counts[rows].max())
                groups.append(
                    LogprobGroup(index, rows, counts[rows], self._device.pad("logprobs", width, self.vocab_size))
                )
        return groups
