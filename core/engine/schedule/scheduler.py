"""The scheduler: requests in, step plans out, results back in. Knows ids and blocks, no text and no tensor.

A step's tokens go first to the running requests (one each to those that decode, then chunks of unfinished prompts),
then to waiting ones in the policy's order. Planning does not wait for answers: the newest token of a running request
may still be in flight, and only its number matters here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from frame.kv_events.events import NO_EVENTS, CacheEvents
from frame.transfers.calls import Transfers

from ...config.tree import FrameConfig
from ...interfaces.connector import ConnectorScheduler, NullConnectorScheduler
from ...interfaces.engine import EngineOutput, EngineRequest, EngineStats
from ...interfaces.kv import KVLayout
from ...interfaces.scheduling import SchedulerPolicy
from ...interfaces.step import ExpertReport, PrefixCosts, StepPlan, StepResult
from ..adapters import AdapterTable, no_workers
from ..answers import Answers
from ..cache.common_prefixes import SharedPrefixes
from ..cache.hashing import BlockHasher
from ..cache.kv_cache import KVCache
from ..grammar.compiler import GrammarCompiler
from ..grammar.constraints import Constraints
from ..lifecycle import Lifecycle
from ..recovery.quarantine import Quarantine
from ..request import QueueFullError, Request, RequestState
from ..request_limits import RequestLimits
from .admission import Admission
from .batch import Batch
from .drafting import Drafting
from .planned_step import LaunchedStep, StepDraft
from .waiting import WaitingQueue

#: Every so many steps it is checked whether a running request gives way to a waiting one.
_STEPS_PER_SWAP = 4


class Scheduler:
    """Called by the engine loop alone. `max_in_flight` plans may be launched before the oldest is answered.

    Where the model has `num_stages`, decoding requests are spread over as many steps, so that every stage has one.
    """

    def __init__(
        self,
        *,
        config: FrameConfig,
        layout: KVLayout,
        policy: SchedulerPolicy,
        connector: ConnectorScheduler,
        max_model_len: int,
        max_in_flight: int,
        num_stages: int = 1,
        compiler: GrammarCompiler,
        prefix_tile_rows: int = 0,
        prefix_costs: PrefixCosts | None = None,
        call: Callable[[str, dict[str, Any]], Any] = no_workers,
        events: CacheEvents = NO_EVENTS,
    ) -> None:
        self.events = events
        self._config = config.scheduler
        self._deterministic = config.model.deterministic
        self._layout = layout
        self._policy = policy
        self._swaps = type(policy).gives_way is not SchedulerPolicy.gives_way
        self._limits = RequestLimits(config.scheduler, layout, max_model_len)
        self.max_in_flight = max_in_flight
        self._num_stages = num_stages
        self._hasher = BlockHasher(config.cache.prefix_caching_hash_algo, layout)
        self._kv = KVCache(
            layout,
            self._hasher,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            connected=not isinstance(connector, NullConnectorScheduler),
            events=events,
        )
        fewest = config.attention.shared_prefix_min_tokens
        costs = prefix_costs if fewest is None else PrefixCosts(fewest, prefix_tile_rows) if fewest else None
        if not prefix_tile_rows or self._deterministic:
            costs = None
        whole = self._kv.whole_groups if costs is not None and self._kv.caches_prefixes else {}
        prefixes = SharedPrefixes(self._config.max_num_seqs, costs, whole, layout.grain)
        self._batch = Batch(self._config.max_num_seqs, prefixes)
        self._waiting = WaitingQueue(policy)
        self._experts = ExpertReport()
        self._transfers = Transfers(connector, self._kv)
        self.lifecycle = lifecycle = Lifecycle(
            kv=self._kv, batch=self._batch, waiting=self._waiting, transfers=self._transfers
        )
        self.constraints = Constraints(lifecycle, compiler, self._config.max_num_seqs)
        self.quarantine = Quarantine()
        lora = config.adapters
        self.adapters = AdapterTable(
            lora.max_loras if lora.enable_lora else 0,
            lora.max_cpu_loras or lora.max_loras,
            call,
            lambda: [one.adapter for one in lifecycle.requests.values()],
        )
        self._admission = Admission(self._config, lifecycle, self.quarantine, self.constraints, self.adapters)
        self._answers = Answers(lifecycle, fail_on_load=config.transfer.kv_load_failure_policy == "fail")
        self._counts = np.zeros(self._config.max_num_seqs, np.int32)
        self._drafting = Drafting(config.speculation, self._batch, self._kv, exact=max_in_flight == 1)
        self._num_steps = 0
        self._num_added = 0

    def add(self, source: EngineRequest) -> None:
        """Queues a request. Raises `ValueError` when it can never run, `QueueFullError` when too many wait."""
        lifecycle = self.lifecycle
        max_len = self._limits.max_len(source)
        if source.request_id in lifecycle.requests or lifecycle.awaits(source.request_id):
            raise ValueError(
                f"request {source.request_id!r} is there already; ids must be unique among unfinished requests, and "
                "ended ones whose blocks a KV connector still uses"
            )
        most = self._config.max_queue
        full = lifecycle.num_waiting >= most and lifecycle.turns.has_its_share(source.owner, most)
        if full and not (source.replayed or source.follows):
            raise QueueFullError(f"{lifecycle.num_waiting} requests wait, max_queue allows {most}")
        adapter = self.adapters.of(source.adapter)
        root = self._hasher.root(
            salt=source.salt,
            adapter=None if adapter is None else adapter.identity,
            media_keys=source.media_keys,
            deterministic=self._deterministic or source.params.deterministic,
            encoder=b"" if source.encoder_ids is None else source.encoder_ids.astype("<i4").tobytes(),
        )
        request = Request(
            source,
            sequence=self._num_added,
            max_len=max_len,
            num_groups=len(self._layout.groups),
            root=root,
            adapter=adapter,
        )
        lifecycle.kept.hand_over(request)
        constraint = source.params.structured_outputs
        if constraint is not None:
            self.constraints.submit(request, constraint)
        lifecycle.turns.enter(request)
        if constraint is None:
            self._waiting.add(request)
        self._num_added += 1
        lifecycle.requests[request.request_id] = request

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests wherever they are and returns their last outputs; unknown and finished ids are ignored."""
        found = [self.lifecycle.requests.get(request_id) for request_id in dict.fromkeys(request_ids)]
        return [self.lifecycle.finish(request, "abort") for request in found if request is not None]

    def schedule(
        self,
        empty: bool = False,
        *,
        admits: bool = True,
        rows: bool = True,
        wait: Callable[[], None] = lambda: None,
    ) -> StepPlan | None:
        """Plans one step, or None when nothing can be done before an answer (or ever); with `empty` one without rows.

        Waiting requests begin only if it `admits` them, and no request goes on without `rows`. Where there is nothing
        to do but to hear what the connector has of them, `wait` is called before it is asked again. The plan counts as
        launched: `update` or `fail` must be called with it.
        """
        lifecycle = self.lifecycle
        if len(lifecycle.launched) >= self.max_in_flight:
            return None
        if self.quarantine.active:
            self._isolate()
        self._kv.checkpoints.save()
        draft = self._draft(rows, admits)
        if draft.undecided and not (empty or lifecycle.launched or draft.counts.any() or self.has_transfers()):
            wait()
            draft = self._draft(rows, admits)
        if not (self._worth_a_step(draft, empty) or empty):
            return None
        launched = draft.launch(self._num_steps, self._batch, lifecycle.removed_slots, lifecycle.finished_ids)
        lifecycle.removed_slots, lifecycle.finished_ids = [], []
        self.adapters.attach(launched.plan, launched.requests)
        self._keep_states(launched)
        lifecycle.launched[launched.plan.step] = launched
        self._num_steps += 1
        if not self._transfers.attach(launched.plan):
            lifecycle.load_nothing(launched)
        return launched.plan

    def _keep_states(self, launched: LaunchedStep) -> None:
        """Has the plan copy what the one before left, and notes whose states the next one is to copy."""
        plan, kv = launched.plan, self._kv
        if not kv.checkpoints.interval:
            return
        plan.copies, made = kv.checkpoints.take()
        launched.publications += made
        ends = plan.num_computed + plan.num_scheduled
        for row in np.flatnonzero(plan.num_scheduled > 1).tolist():
            request = launched.requests[row]
            if request is not None:
                kv.note_state(request, int(ends[row]))

    def _draft(self, rows: bool, admits: bool) -> StepDraft:
        """A step with all that can be done now."""
        self._counts.fill(0)
        draft = StepDraft(self._config.max_num_batched_tokens, self._counts)
        if rows:
            self._fill(draft, admits)
        return draft

    def _fill(self, draft: StepDraft, admits: bool) -> None:
        """Gives `draft` its rows."""
        order, todo = self._batch.order, self._todo()
        decodes = self._batch.share(order[todo == 1], self._num_stages)
        self._continue_decodes(draft, decodes)
        draft.no_room = draft.budget == 0  # the decoding requests take all tokens of the step
        several = todo > 1
        if np.count_nonzero(several):
            self._continue_prefills(draft, order[several].tolist(), todo[several].tolist())
        if not draft.preempted and admits:
            self._admission.admit(draft)
            if draft.no_room and self._swaps and self._num_steps % _STEPS_PER_SWAP == 0:
                self._make_way(draft)
        if self._drafting.active:
            self._drafting.extend(draft, decodes)

    def _make_way(self, draft: StepDraft) -> None:
        """Preempts running requests in favour of a waiting one that lacks nothing but room, if the policy says so.

        One is preempted, and more of them while too few blocks are free for the first step of the waiting one, which
        is put before all others in the queue: preempted requests of other owners may stand before it.
        """
        gives_way, turns = self._policy.gives_way, self.lifecycle.turns
        admitted = {new.slot for new in draft.added}  # in this step, whose plan names their slots already
        shared = {  # whose blocks of this step others of them read
            slot
            for slot, made in draft.publications.items()
            if any(pool.references(block) > 1 for pool, block, _ in made)
        }
        running = [one for one in self._batch.requests if one.slot not in admitted | shared]
        for waiting in self._waiting.first_of_each(turns.num_waiting, self._admission.may_run):
            leaving = [one for one in running if gives_way(one, waiting)]
            if leaving:
                break
        else:
            return
        self._waiting.put_first(waiting)
        needed = self._admission.num_blocks(waiting)
        for victim in sorted(leaving, key=self._order_of, reverse=True):
            if gives_way(victim, waiting):
                turns.put_behind(victim, waiting)
                self.lifecycle.preempt(victim, draft)
                # those that stay may each take one more block of every group before the answers free its slot
                room = needed + len(self._batch) * len(self._layout.groups)
                while self._kv.pool.num_free < room and self.lifecycle.kept.drop():
                    pass  # what sessions hold goes first
                if self._kv.pool.num_free >= room:
                    return

    def _isolate(self) -> None:
        """Lets only those run whom the quarantine allows to."""
        self.quarantine.review(self.lifecycle.requests)
        for request in reversed(self._batch.requests):
            if not self.quarantine.allows(request):
                self.lifecycle.preempt(request)

    def _todo(self) -> np.ndarray:
        """Tokens [running] that each running request has to compute now, in order of admission."""
        batch = self._batch
        # where the last allowed token is in flight or known there is nothing to compute
        by_slot = (batch.num_planned - batch.num_computed) * (batch.num_planned < batch.max_len)
        if batch.constrained:
            by_slot[self._without_mask()] = 0
        todo: np.ndarray = by_slot[batch.order]
        return todo

    def _without_mask(self) -> list[int]:
        """Slots whose grammar is slow, and whose mask is not there or cannot be: a token before it is in flight."""
        batch, found = self._batch, []
        for slot in batch.constrained:
            request = batch.owners[slot]
            if request is None or request.grammar is None or not request.grammar.slow:
                continue
            if batch.num_planned[slot] > request.num_tokens or self.constraints.must_wait(request):
                found.append(slot)
        return found

    def _continue_decodes(self, draft: StepDraft, slots: np.ndarray) -> None:
        batch = self._batch
        slots = slots[: draft.budget]
        draft.counts[slots] = 1
        draft.budget -= len(slots)
        full = (batch.num_computed >= batch.covered)[slots]
        if not np.count_nonzero(full):
            return
        for slot in slots[full].tolist():
            request = batch.owners[slot]
            if request is None:
                continue  # preempted for a request before it
            if self._kv.add_block(request):
                batch.covered[slot] += self._kv.block_size
                draft.note_block(request)
            elif not self._grow(draft, request, 1) and request.batch is not None:
                draft.take_back(slot)

    def _continue_prefills(self, draft: StepDraft, slots: list[int], todo: list[int]) -> None:
        batch, kv = self._batch, self._kv
        for slot, remaining in zip(slots, todo, strict=True):
            request = batch.owners[slot]
            if request is None:
                continue  # preempted for a request before it
            count = self._admission.chunk(remaining, draft.budget)
            count = kv.chunk(request, int(batch.num_computed[slot]), count)
            while count and not self._grow(draft, request, count):
                # alone, and the rest is held by ended requests or too small: take what fits
                count = count // 2 if request.batch is not None else 0
            if request.batch is None:
                continue
            if count:
                draft.give(slot, count)
                draft.publications[slot] = kv.publish_planned(request, int(batch.num_computed[slot]), count)
            self._admission.count_partial(draft, request, remaining - count)

    def _grow(self, draft: StepDraft, request: Request, count: int) -> bool:
        """Makes room for `count` more tokens, at the cost of others; False when not, or when it gave way itself."""
        kv, batch = self._kv, self._batch
        total = int(batch.num_computed[request.slot]) + count
        while not draft.extend(kv, batch, request, total):
            if self._admission.reclaim():
                continue
            if len(batch) == 1:
                return False
            victim = self._least_urgent()
            self.lifecycle.preempt(victim, draft)
            if victim is request:
                return False
        return True

    def _least_urgent(self) -> Request:
        """The running request that is preempted for lack of blocks: the last one, or the last that gives way to it."""
        policy, running = self._policy, self._batch.requests
        last = max(running, key=self._order_of)
        if not self._swaps:
            return last
        return max((one for one in running if policy.gives_way(one, last)), key=self._order_of, default=last)

    def _order_of(self, request: Request) -> tuple[Any, ...]:
        return self._policy.key(request), request.sequence

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Applies the answer to a launched plan; plans are answered in the order of their launch."""
        step = self._launched(plan)
        outputs = []
        try:
            if result.transfer is not None:
                outputs += self._answers.apply_transfer(result.transfer, step)
            self.lifecycle.give_up_late()
            self._experts = result.experts or self._experts
            self._drafting.answer(step, result)
            outputs += self._answers.accept(step, result)
        finally:
            self.lifecycle.answer(plan)
        return outputs

    def fail(self, plan: StepPlan, error: str) -> list[EngineOutput]:
        """Has the requests of a step that raised computed again in halves; one that was alone in it ends with "error".

        A request that was alone and waited for a load of the connector is computed without the connector first. A later
        plan repeats the removals and additions that workers learnt from this plan alone.
        """
        step, living = self._launched(plan), self.living(plan)
        self._transfers.lose(plan, step.loads)
        self._kv.checkpoints.drop()
        self.adapters.lose(plan)
        guilty = self.quarantine.blame(living)
        if guilty is not None and guilty.transfer.unconfirmed:
            guilty = None
        outputs = self._answers.fail_step(step, error, [one for one in living if one is not guilty])
        lifecycle, owners = self.lifecycle, self._batch.owners
        since = [launched.plan for launched in lifecycle.launched.values() if launched.plan.step >= plan.step]
        reused = {new.slot for one in since for new in one.added}
        gone = [slot for slot in plan.removed_slots.tolist() if owners[slot] is None and slot not in reused]
        lifecycle.removed_slots += [slot for slot in gone if slot not in lifecycle.removed_slots]
        lifecycle.finished_ids += plan.finished_ids
        lifecycle.answer(plan)
        return outputs

    def use_pause(self) -> None:
        """Called while only a connector has work: hashes what it loads, which is published once all is there."""
        for request in self.lifecycle.loading.values():
            if self._kv.hash_some(request, request.transfer.num_loaded):
                break

    def end_unread(self) -> list[EngineOutput]:
        """Ends the requests whose adapter could not be read again."""
        failed, requests = self.adapters.take_failed(), list(self.lifecycle.requests.values())
        return [
            self.lifecycle.finish(one, "error", error=failed[one.adapter]) for one in requests if one.adapter in failed
        ]

    def constrained(self, plan: StepPlan) -> LaunchedStep | None:
        """The step of a plan in which some row that yields a token follows a grammar, else None."""
        constrained = self._batch.constrained
        if not constrained or constrained.isdisjoint(plan.slots[plan.samples].tolist()):
            return None
        return self.lifecycle.launched[plan.step]

    def living(self, plan: StepPlan) -> list[Request]:
        """The unfinished requests whose tokens a launched plan computes."""
        step = self._launched(plan)
        return [one for one in step.requests if one is not None and one.state is not RequestState.FINISHED]

    def _launched(self, plan: StepPlan) -> LaunchedStep:
        step = self.lifecycle.launched.get(plan.step)
        if step is None:
            raise ValueError(f"step {plan.step} is not in flight; there are: {list(self.lifecycle.launched)}")
        return step

    def _worth_a_step(self, draft: StepDraft, empty: bool) -> bool:
        if np.count_nonzero(draft.counts) or draft.undecided or self.has_transfers():
            return True
        return not self.lifecycle.launched and self.lifecycle.await_abandoned(missed=empty)

    @property
    def num_transfers(self) -> int:
        """Requests whose blocks the connector may be writing or reading."""
        lifecycle = self.lifecycle
        return len(lifecycle.loading) + len(lifecycle.abandoned) + len(lifecycle.held)

    def has_transfers(self) -> bool:
        """Whether the connector needs steps, if need be without tokens, to go on with its transfers."""
        lifecycle = self.lifecycle
        return self._transfers.active and bool(
            lifecycle.loading or lifecycle.held or lifecycle.finished_ids or self._transfers.asks
        )

    def preempt_all(self) -> None:
        """Sends every running request back to the queue, in its order."""
        for request in reversed(self._batch.requests):
            self.lifecycle.preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; returns whether it could, which it cannot while requests run or load."""
        while self._admission.reclaim():
            pass
        if len(self._batch) or self.lifecycle.loading:
            return False
        self._kv.withdraw_all()
        return True

    def stats(self) -> EngineStats:
        """Counters since the start and current gauges; the engine adds those of its steps."""
        lifecycle, admission = self.lifecycle, self._admission
        stats = EngineStats(
            running=len(self._batch),
            waiting=lifecycle.num_waiting,
            kv_usage=self._kv.pool.usage,
            num_blocks=self._layout.pools[0],
            prefix_queries=admission.prefix_queries,
            prefix_hits=admission.prefix_hits,
            preemptions=lifecycle.num_preemptions,
            prompt_tokens=admission.prompt_tokens,
            generated_tokens=self._answers.generated_tokens,
            finished=dict(lifecycle.finished_counts),
            connector_counters=dict(self._transfers.counters),
            connector_gauges=dict(self._transfers.gauges),
            expert_balancedness=self._experts.balancedness,
            num_expert_placements=self._experts.num_placements,
            num_expert_copies=self._experts.num_copies,
        )
        self.adapters.fill(stats, lifecycle.requests)
        self._drafting.fill(stats)
        stats.num_kv_events, stats.num_kv_events_dropped = self.events.counts()
        return stats
