"""A step that is being planned, and the record of a launched one. Knows arrays and requests, and takes no decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...interfaces.engine import PromptEmbeds
from ...interfaces.step import EMBEDS, BlockAppend, NewRequest, StepPlan
from ...interfaces.wire import encode
from ..cache.checkpoints import Publication
from ..cache.kv_cache import KVCache
from ..request import Request
from .batch import Batch

_NO_SLOTS = np.zeros(0, np.int32)
_NO_SLOTS.flags.writeable = False


def _embeds(plan: StepPlan, requests: Sequence[Request | None]) -> dict[str, bytes]:
    """The embeddings of tokens that a step computes, at their places among its tokens; empty without any."""
    found, start = list[PromptEmbeds](), 0
    for request, first, count in zip(requests, plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True):
        if request is not None and (embeds := request.source.embeds) is not None:
            own = embeds.between(first, first + count)
            found.append(PromptEmbeds(rows=own.rows, places=own.places + (start - first)))
        start += count
    if not any(len(one.places) for one in found):
        return {}
    rows, places = (np.concatenate([getattr(one, name) for one in found]) for name in ("rows", "places"))
    return {EMBEDS: encode(PromptEmbeds(rows=rows, places=places))}


@dataclass
class LaunchedStep:
    """What must be remembered of a launched step until it is answered.

    `requests` [B] by row; None where the row's tokens must be dropped. `loads` are the asynchronous loads it starts.
    """

    plan: StepPlan
    requests: Sequence[Request | None]
    publications: list[Publication]
    loads: list[Request]


@dataclass
class StepDraft:
    """A step while it is planned: `counts` int32 [num_slots] tokens of each slot so far, `budget` tokens still free.

    `drafts` int32 [num_slots]: how many of a slot's tokens are drafts; None where no slot has any.
    """

    budget: int
    counts: np.ndarray
    added: list[NewRequest] = field(default_factory=list)
    loads: list[Request] = field(default_factory=list)
    publications: dict[int, list[Publication]] = field(default_factory=dict)  # by slot
    preempted: bool = False
    drafts: np.ndarray | None = None
    several: bool = False  # a row has more than one token
    no_room: bool = False  # a waiting request finds no slot, no blocks or no tokens
    undecided: bool = False  # the connector wants to be asked about a request again
    num_partial: int = 0  # prompts that stay partly computed after this step
    num_long_partial: int = 0
    _grown: list[tuple[int, int, int, int]] = field(default_factory=list)  # group, slot, offset in its table, block

    def give(self, slot: int, count: int) -> None:
        """Schedules `count` tokens of `slot`."""
        self.counts[slot] = count
        self.budget -= count
        self.several |= count > 1

    def take_back(self, slot: int) -> list[Publication]:
        """Drops all that was planned for `slot`; returns what was published for it."""
        self.budget += int(self.counts[slot])
        self.counts[slot] = 0
        self._grown = [entry for entry in self._grown if entry[1] != slot]
        return self.publications.pop(slot, [])

    def extend(self, kv: KVCache, batch: Batch, request: Request, total: int) -> bool:
        """Takes free blocks for the first `total` tokens of a running request; False without enough of them."""
        before = [len(table) for table in request.cache.blocks]
        if not kv.extend(request, batch.least_computed(request.slot), total):
            return False
        batch.covered[request.slot] = kv.capacity(request)
        for group, start in enumerate(before):
            new = enumerate(request.cache.blocks[group][start:], start)
            self._grown += [(group, request.slot, place, block) for place, block in new]
        return True

    def note_block(self, request: Request) -> None:
        """Notes the last block of each of a request's tables."""
        for group, table in enumerate(request.cache.blocks):
            self._grown.append((group, request.slot, len(table) - 1, table[-1]))

    def _appends(self) -> list[BlockAppend]:
        if not self._grown:
            return []
        grown = np.array(self._grown, np.int32)
        appends = []
        for group in sorted(set(grown[:, 0].tolist())):
            slots, offsets, block_ids = grown[grown[:, 0] == group, 1:].T.copy()
            appends.append(BlockAppend(group=group, slots=slots, offsets=offsets, block_ids=block_ids))
        return appends

    def launch(self, step: int, batch: Batch, removed_slots: list[int], finished_ids: list[str]) -> LaunchedStep:
        """Makes the plan and counts it in the batch. Rows with fewer tokens come first, so decodes precede prefills."""
        slots = batch.order
        counts = self.counts[slots]
        if np.count_nonzero(counts) < len(counts):
            slots, counts = slots[counts > 0], counts[counts > 0]
        if self.several:
            order = np.argsort(counts, kind="stable")
            slots, counts = slots[order], counts[order]
        owners = batch.owners
        requests = batch.requests if slots is batch.order else [owners[slot] for slot in slots.tolist()]
        computed, planned = batch.num_computed[slots], batch.num_planned[slots]
        after = computed + counts
        drafts = np.zeros(len(slots), np.int32)
        if self.drafts is not None:
            drafts = self.drafts[slots]
            planned = planned + drafts
            batch.num_unsure[slots] += drafts
        samples = after == planned
        if batch.pools:
            samples &= np.array([slot not in batch.pools for slot in slots.tolist()], np.bool_)
        plan = StepPlan(
            step=step,
            removed_slots=np.array(removed_slots, np.int32) if removed_slots else _NO_SLOTS,
            added=self.added,
            appends=self._appends(),
            slots=slots,
            num_scheduled=counts,
            num_computed=computed,
            samples=samples,
            num_drafts=drafts,
            finished_ids=finished_ids,
            deterministic=bool(batch.deterministic) and not batch.deterministic.isdisjoint(slots.tolist()),
        )
        if batch.embedded:
            plan.extras = _embeds(plan, requests)
        batch.num_computed[slots] = after
        batch.num_planned[slots] = planned + samples
        batch.slots.launch(slots)
        if not plan.deterministic:
            plan.prefixes = batch.prefixes.rows(slots, counts, computed)
        publications = [made for several in self.publications.values() for made in several]
        return LaunchedStep(plan, requests, publications, self.loads)
