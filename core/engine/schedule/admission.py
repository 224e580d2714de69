"""Which waiting requests enter the step, with how many tokens, and what of them is already cached."""

from __future__ import annotations

from ...config.tree import SchedulerConfig
from ..adapters import AdapterTable
from ..cache.kv_cache import PrefixHit
from ..grammar.constraints import Constraints
from ..lifecycle import Lifecycle
from ..recovery.quarantine import Quarantine
from ..request import Request, RequestState
from .planned_step import StepDraft


class Admission:
    """Takes requests from the queue in its order while tokens, slots and blocks last."""

    def __init__(
        self,
        config: SchedulerConfig,
        lifecycle: Lifecycle,
        quarantine: Quarantine,
        constraints: Constraints,
        adapters: AdapterTable,
    ) -> None:
        self._adapters = adapters
        self._lifecycle = lifecycle
        self._constraints = constraints
        self._quarantine = quarantine
        self._chunked = config.enable_chunked_prefill
        self._max_tokens = config.max_num_batched_tokens
        self._max_partial = config.max_num_partial_prefills
        self._max_long_partial = config.max_long_partial_prefills
        self._long = config.long_prefill_token_threshold
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.prompt_tokens = 0

    def chunk(self, remaining: int, budget: int) -> int:
        """Tokens of a prompt with `remaining` left that one step takes."""
        most = self._long if self._chunked and self._long else remaining
        return min(remaining, budget, most)

    def count_partial(self, draft: StepDraft, request: Request, remaining: int) -> None:
        """Notes that `remaining` tokens of a prompt are left after this step."""
        if remaining > 0:
            draft.num_partial += 1
            draft.num_long_partial += self._is_long(request)

    def admit(self, draft: StepDraft) -> None:
        """Fills what is left of the step; stops at the first request for which there is no room."""
        slots = self._lifecycle.batch.slots
        draft.no_room |= slots.num_free == 0
        if draft.budget == 0 or slots.num_free == 0:
            return
        self._adapters.begin()
        for request in self._lifecycle.waiting:
            if draft.budget == 0 or slots.num_free == 0:
                break
            if request.num_unanswered and self._quarantine.allows(request):
                break  # preempted a moment ago: its newest token is still in flight, and the others must not overtake
            if self._has_adapter(request) and self.may_run(request) and not self._try(draft, request):
                draft.no_room = True
                break

    def may_run(self, request: Request) -> bool:
        """Whether nothing but room is missing for a waiting request."""
        if request.num_unanswered or (self._quarantine.active and not self._quarantine.allows(request)):
            return False
        return not self._constraints.must_wait(request) and self._adapters.may_run(request.adapter)

    def _has_adapter(self, request: Request) -> bool:
        adapters, batch = self._adapters, self._lifecycle.batch
        return request.adapter is None or (adapters.may_run(request.adapter) and adapters.has_slot(request, batch))

    def _is_long(self, request: Request) -> bool:
        return 0 < self._long < request.num_tokens

    def _try(self, draft: StepDraft, request: Request) -> bool:
        """Admits, starts a load, or passes over the request; False when the queue must wait for room."""
        kv, transfers = self._lifecycle.kv, self._lifecycle.transfers
        hit, external, later = PrefixHit(0, [[] for _ in request.cache.blocks]), 0, False
        if not request.transfer.num_loaded:
            hit = kv.find_hit(request)
            found, later = transfers.match(request, hit.num_tokens)
            if found is None:
                draft.undecided = True
                return True
            external = found
        num_computed = request.transfer.num_loaded or hit.num_tokens + external
        count = 0  # of tokens that this step computes
        if later:
            while not kv.admit(request, hit, num_computed, num_computed):
                # if nothing runs, only blocks that were loaded for later requests can make room
                if len(self._lifecycle.batch) or not self.reclaim(request):
                    return False
        else:
            remaining, budget = request.num_tokens - num_computed, draft.budget - request.num_encoded
            if budget <= 0:
                return False  # the whole encoder prompt is computed in the first step
            count = self.chunk(remaining, budget)
            if count < remaining and not self._may_be_partial(draft, request):
                return self._chunked
            if self._chunked:
                count = kv.chunk(request, num_computed, count, hit)
            count = self._allocate(request, hit, num_computed, count)
            if count == 0:
                return False
        if not transfers.allocated(request, num_computed, external):
            kv.free(request)
            draft.undecided = True
            return True
        self._note_cached(request, hit, num_computed)
        if later:
            request.transfer.hold_loaded(num_computed)
            self._lifecycle.load(request)
            draft.loads.append(request)
        else:
            request.transfer.await_step(external > 0)
            self._enter(draft, request, num_computed, count)
        return True

    def _may_be_partial(self, draft: StepDraft, request: Request) -> bool:
        """Whether the step may take a part of the request's tokens.

        Without chunked prefill only of a preempted request whose tokens no longer fit in any step.
        """
        if not self._chunked:
            return request.num_tokens + request.num_encoded > self._max_tokens
        if self._is_long(request) and draft.num_long_partial >= self._max_long_partial:
            return False
        return draft.num_partial < self._max_partial

    def _allocate(self, request: Request, hit: PrefixHit, num_computed: int, count: int) -> int:
        """Gives blocks for `count` more tokens, or for fewer when nothing else runs; returns how many, 0 if none."""
        kv, alone = self._lifecycle.kv, len(self._lifecycle.batch) == 0
        reserve = self._reserve(request)
        while count:
            total = num_computed + count
            if request.transfer.num_loaded:
                fits = kv.extend(request, num_computed, total, reserve=reserve)
            else:
                fits = kv.admit(request, hit, num_computed, total, reserve=reserve)
            if fits:
                return count
            if self._lifecycle.kept.drop():
                continue
            if not alone:
                return 0
            if not self.reclaim(request):
                count //= 2
        return 0

    def num_blocks(self, request: Request) -> int:
        """Free blocks without which a waiting request is not admitted; 0 for one that has blocks already."""
        if request.transfer.num_loaded:
            return 0
        kv, hit = self._lifecycle.kv, self._lifecycle.kv.find_hit(request)
        total = min(request.num_tokens, hit.num_tokens + self._max_tokens)
        return kv.num_taken(request, hit, hit.num_tokens, total) + self._reserve(request)

    def _reserve(self, request: Request) -> int:
        # a preempted request that came straight back would only be preempted again by the next block boundary
        return len(self._lifecycle.batch) if request.num_preemptions else 0

    def reclaim(self, keep: Request | None = None) -> bool:
        """Takes blocks from a session that waits for input, else of the last waiting request with any; False: none."""
        kept = self._lifecycle.kept
        if kept.drop():
            return True
        if not (self._lifecycle.transfers.active or kept.used):
            return False
        for request in reversed(list(self._lifecycle.waiting)):
            if request is not keep and request.transfer.num_loaded:
                self._lifecycle.kv.free(request)
                return True
        return False

    def _note_cached(self, request: Request, hit: PrefixHit, num_computed: int) -> None:
        if request.reported.num_cached is not None:
            return
        request.reported.admit(min(num_computed, request.prompt_len))
        self.prompt_tokens += request.prompt_len + request.num_encoded
        if self._lifecycle.kv.caches_prefixes and request.reads_cache:
            self.prefix_queries += request.prompt_len
            self.prefix_hits += min(hit.num_tokens, request.prompt_len)

    def _enter(self, draft: StepDraft, request: Request, num_computed: int, count: int) -> None:
        lifecycle = self._lifecycle
        if request.state is not RequestState.WAITING:
            raise RuntimeError(f"request {request.request_id!r} is {request.state.value}, not waiting")
        lifecycle.waiting.remove(request)
        request.transfer.hold_loaded(0)
        lifecycle.turns.admit(request)
        slot = lifecycle.batch.enter(request, num_computed, lifecycle.kv.capacity(request))
        draft.give(slot, count)
        draft.budget -= request.num_encoded
        adapter = self._adapters.take(request, lifecycle.batch)
        draft.added.append(request.to_new_request(slot, num_computed, adapter))
        draft.publications[slot] = lifecycle.kv.publish_planned(request, num_computed, count)
        self.count_partial(draft, request, request.num_tokens - num_computed - count)
