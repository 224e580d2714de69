"""How many draft tokens each running request gets in a step, and how many of them were accepted. Knows no speculator.

Drafts are extra work: they take the tokens of a step that requests and prompts leave, and blocks that are free. While
they are in flight the batch counts all of them as tokens; the answer takes back those that were rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...config.tree import SpeculationConfig
from ...interfaces.engine import EngineStats
from ...interfaces.step import StepResult
from ..cache.kv_cache import KVCache
from .batch import Batch
from .planned_step import LaunchedStep, StepDraft


class Drafting:
    """Plans drafts and counts them. `exact` says that every answer is known before the next step is planned."""

    def __init__(self, config: SpeculationConfig, batch: Batch, kv: KVCache, *, exact: bool) -> None:
        self.active = config.speculator is not None
        self._most = config.num_speculative_tokens
        self._batch_limit = config.disable_by_batch_size
        self._batch = batch
        self._kv = kv
        self._exact = exact
        self._num_drafts = 0
        self._num_accepted_per_place = np.zeros(self._most, np.int64)
        self._num_draft_tokens = 0

    def extend(self, draft: StepDraft, slots: np.ndarray) -> None:
        """Adds drafts to those of the decoding `slots` that still have their one token in the step."""
        batch = self._batch
        if draft.budget == 0 or (self._batch_limit is not None and len(batch) > self._batch_limit):
            return
        slots = slots[draft.counts[slots] == 1]
        if batch.constrained:  # a grammar must see each token before the next is drawn
            slots = np.array([slot for slot in slots.tolist() if slot not in batch.constrained], np.int32)
        # all drafts may be accepted, and one more token is drawn after them
        room = batch.max_len[slots] - batch.num_planned[slots] - 1
        counts = np.minimum(batch.num_drafts[slots], room)
        counts = np.clip(draft.budget - (np.cumsum(counts) - counts), 0, counts)
        if not np.count_nonzero(counts):
            return
        totals = batch.num_computed[slots] + 1 + counts
        for index in np.flatnonzero((totals > batch.covered[slots]) & (counts > 0)).tolist():
            slot, total = int(slots[index]), int(totals[index])
            if (request := batch.owners[slot]) is not None:
                draft.extend(self._kv, batch, request, total)
            covered = min(int(batch.covered[slot]), total)
            counts[index] = max(0, covered - int(batch.num_computed[slot]) - 1)
        draft.counts[slots] += counts
        draft.drafts = np.zeros_like(draft.counts)
        draft.drafts[slots] = counts
        draft.budget -= int(counts.sum())
        draft.several = True

    def answer(self, step: LaunchedStep, result: StepResult) -> None:
        """Takes back rejected drafts of requests that still run; called before the step's tokens are added."""
        if result.num_drafts is None or result.num_next_drafts is None:
            return
        plan, batch = step.plan, self._batch
        rows = np.array([row for row, one in enumerate(step.requests) if one is not None and one.batch is batch], int)
        rows = rows[plan.samples[rows]]
        slots, planned, tokens = plan.slots[rows], plan.num_drafts[rows], result.num_tokens[rows]
        rejected = planned + 1 - np.maximum(tokens, 1)
        batch.num_computed[slots] -= rejected
        batch.num_planned[slots] -= rejected
        batch.num_unsure[slots] -= planned
        # without the answer, drafts after this step say that there may be some after the next one
        following = result.num_next_drafts[rows]
        batch.num_drafts[slots] = following if self._exact else np.where(following > 0, self._most, 0)
        self._count(result.num_drafts[rows], tokens - 1)

    def _count(self, checked: np.ndarray, accepted: np.ndarray) -> None:
        accepted = accepted[checked > 0]
        self._num_drafts += len(accepted)
        self._num_draft_tokens += int(checked.sum())
        for place in range(int(accepted.max(initial=0))):
            self._num_accepted_per_place[place] += int((accepted > place).sum())

    def fill(self, stats: EngineStats) -> None:
        """Fills in the counters of drafts."""
        per_place: Sequence[int] = self._num_accepted_per_place.tolist() if self.active else []
        stats.num_drafts = self._num_drafts
        stats.num_draft_tokens = self._num_draft_tokens
        stats.num_accepted_tokens = sum(per_place)
        stats.num_accepted_per_place = list(per_place)
