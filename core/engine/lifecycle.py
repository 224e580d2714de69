"""The moves of a request between waiting, loading, running and finished, and what each gives back. Decides nothing."""

from __future__ import annotations

import time
from collections import Counter
from copy import copy

from frame.transfers.calls import Transfers

from ..interfaces.engine import EngineOutput, FinishReason
from ..interfaces.step import StepPlan
from .cache.kept import KeptBlocks
from .cache.kv_cache import KVCache
from .request import CachedBlocks, Request, RequestState, TransferState
from .schedule.batch import Batch
from .schedule.planned_step import LaunchedStep, StepDraft
from .schedule.turns import Turns
from .schedule.waiting import WaitingQueue

#: Seconds after which a load that a failed step may have begun, and no report names, is taken as never begun.
ABANDONED_SECONDS = 600.0


class Lifecycle:
    """Every unfinished request by id, and the finished ones that still hold something.

    The next plan tells the worker of `removed_slots` and `finished_ids`.
    """

    def __init__(self, *, kv: KVCache, batch: Batch, waiting: WaitingQueue, transfers: Transfers) -> None:
        self.kv = kv
        self.batch = batch
        self.waiting = waiting
        self.transfers = transfers
        self.kept = KeptBlocks(kv, connected=transfers.active)
        self.turns = Turns()
        self.requests: dict[str, Request] = {}
        self.launched: dict[int, LaunchedStep] = {}  # by number, oldest first: the steps that were not answered
        self.loading: dict[str, Request] = {}  # by id; also finished ones whose load is under way
        self.abandoned: dict[str, Request] = {}  # what holds the blocks of loads that may have begun in a failed step
        self.held: dict[str, Request] = {}  # finished, blocks read by the connector
        self.removed_slots: list[int] = []
        self.finished_ids: list[str] = []
        self.finished_counts: Counter[str] = Counter()
        self.num_preemptions = 0
        self._abandoned_until: dict[str, float] = {}  # by id, the first to end first
        self._draining: dict[int, Request] = {}  # by slot: finished, named by unanswered steps

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that do not run."""
        return len(self.requests) - len(self.batch)

    def preempt(self, request: Request, draft: StepDraft | None = None) -> None:
        """Sends a running request back to the queue without blocks; what `draft` planned for it is dropped.

        Tokens that are in flight are still accepted; until they are, it is not admitted again.
        """
        slot = request.slot
        if draft is not None:
            self.kv.withdraw(draft.take_back(slot))
            draft.preempted = True
        self.batch.leave(request)
        self.removed_slots.append(slot)
        self.kv.free(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def roll_back(self, request: Request, first: int = 0) -> None:
        """Recomputes a running or waiting request from its known tokens; what steps from `first` on sample is lost."""
        dropped = 0
        for step in self.launched.values():
            if step.plan.step < first:
                continue
            dropped += request in step.requests
            step.requests = [None if owner is request else owner for owner in step.requests]
        if request.state is RequestState.RUNNING:
            self.preempt(request)
        elif request.state is RequestState.WAITING:
            self.kv.free(request)
        request.num_unanswered -= dropped  # earlier steps may still answer

    def load_nothing(self, step: LaunchedStep) -> None:
        """Called when a launched step could not name its loads to the workers: their requests start again."""
        for request in step.loads:
            self.kv.free(request)
            request.transfer.give_up()
            self.loaded(request)
        for row in step.requests:
            if row is not None and row.transfer.unconfirmed:
                row.transfer.give_up()
                self.roll_back(row)

    def load(self, request: Request) -> None:
        """Moves a waiting request to those whose blocks the connector is filling."""
        self.waiting.remove(request)
        request.state = RequestState.LOADING
        request.transfer.load(True)
        self.loading[request.request_id] = request

    def loaded(self, request: Request) -> None:
        """Called when a load ended: the request is queued with its blocks; a finished one gives them back."""
        (self.loading if request.request_id in self.loading else self.abandoned).pop(request.request_id)
        self._abandoned_until.pop(request.request_id, None)
        request.transfer.load(False)
        if request.state is RequestState.FINISHED:
            self._settle(request)
        else:
            request.state = RequestState.WAITING
            self.waiting.add(request)

    def abandon(self, request: Request) -> None:
        """The step that was to begin its load failed, or the load was given up: it starts again without the connector.

        Something may still write to its blocks, so they stay out of use until its end is reported; nobody waits for it.
        """
        owner = self.loading.pop(request.request_id)
        if request.state is not RequestState.FINISHED:
            owner = copy(request)
            owner.state, owner.transfer = RequestState.FINISHED, TransferState(asks=False, loading=True)
            request.cache = CachedBlocks.none(len(request.cache.blocks), request.cache.root)
            request.transfer = TransferState(asks=False)
            request.state = RequestState.WAITING
            self.waiting.add(request)
        self.abandoned[request.request_id] = owner
        self.prolong(request.request_id)

    def prolong(self, request_id: str) -> None:
        """An abandoned load may be under way for as long again; other ids are ignored."""
        if request_id in self.abandoned:
            self._abandoned_until.pop(request_id, None)
            self._abandoned_until[request_id] = time.monotonic() + ABANDONED_SECONDS

    def await_abandoned(self, missed: bool) -> bool:
        """Whether a step without tokens may free blocks: those of abandoned loads that end.

        Nobody waits for them unless requests are unfinished or the caller has `missed` blocks.
        """
        return bool(self.abandoned) and (missed or bool(self.requests))

    def give_up_late(self) -> None:
        """Frees the blocks of loads that no report has named for longer than any load takes; called behind a report."""
        while self._abandoned_until:
            name, latest = next(iter(self._abandoned_until.items()))
            if time.monotonic() < latest:
                return
            self.loaded(self.abandoned[name])

    def give_up_abandoned(self) -> None:
        """Called once no abandoned load can be under way: their blocks are free."""
        for request in list(self.abandoned.values()):
            self.loaded(request)

    def finish(
        self, request: Request, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None
    ) -> EngineOutput:
        """Ends an unfinished request; its slot and blocks are free once no step and no connector uses them."""
        drained = True
        if request.state is RequestState.RUNNING:
            if reason in ("stop", "length"):
                self.kept.keep(request)
            slot = request.slot
            drained = self.batch.leave(request)
            if drained:
                self.removed_slots.append(slot)
            else:
                self._draining[slot] = request
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
            request.num_unanswered = 0  # it has no blocks that those steps could touch
        request.state = RequestState.FINISHED
        del self.requests[request.request_id]
        self.turns.end(request)
        self.finished_counts[reason] += 1
        held, parameters = self.transfers.finished(request, reason)
        request.transfer.hold(held)
        if held:
            self.held[request.request_id] = request
        if drained:
            self.finished_ids.append(request.request_id)
            self._settle(request)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            kv_transfer=parameters,
        )

    def answer(self, plan: StepPlan) -> None:
        """Called when a launched step was answered or failed: finished requests give back slot and blocks."""
        del self.launched[plan.step]
        for slot in self.batch.slots.answer(plan.slots):
            request = self._draining.pop(slot, None)
            if request is not None:
                request.num_unanswered = 0
                self.removed_slots.append(slot)
                self.finished_ids.append(request.request_id)
                self._settle(request)

    def awaits(self, request_id: str) -> bool:
        """Whether blocks of a request wait for the connector to have written or read them."""
        return request_id in self.held or request_id in self.loading or request_id in self.abandoned

    def sent(self, request_id: str) -> None:
        """Gives back the blocks of a finished request that the connector no longer reads; unknown ids are ignored."""
        request = self.held.pop(request_id, None)
        if request is not None:
            request.transfer.hold(False)
            self._settle(request)

    def _settle(self, request: Request) -> None:
        if request.transfer.loading or request.num_unanswered:
            return
        if request.transfer.held:
            self.kv.checkpoints.leave(request)
        else:
            self.kv.free(request)
