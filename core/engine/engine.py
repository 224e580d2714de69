"""The engine: plans steps, launches them, and turns their results into outputs. Knows ids only.

`step` keeps as many steps launched as the scheduler plans ahead: the next one is planned before the tokens of the
current one have reached the host.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from frame.quoting import quoted
from frame.transfers import news
from frame.transfers.merging import ResultMerge

from ..interfaces.client import BrokenEngineError, EngineInfo
from ..interfaces.connector import ConnectorScheduler, NullConnectorScheduler
from ..interfaces.engine import EngineOutput, EngineRequest, EngineStats
from ..interfaces.executor import Executor, Progress, StepHandle
from ..interfaces.step import StepPlan
from ..processes.journal import NullJournal
from .idle_capture import IdleCapture
from .pause import Pause
from .recovery.suspects import Suspects
from .schedule.planned_step import LaunchedStep
from .schedule.scheduler import Scheduler
from .waves import NoWaves, Waves
from .weight_update import update_weights

logger = logging.getLogger("frame.engine")

#: Pause between steps that only let a connector's transfers progress.
IDLE_SECONDS = 0.0005
#: The longest that it waits for a connector's first word on requests, before a step without rows.
WORD_SECONDS = 0.001
#: The longest that the loop waits for requests before it asks again whether blocks of ended requests were read.
HOLD_SECONDS = 0.02
#: The longest that sleep and resets wait for transfers of a KV connector.
TRANSFER_SECONDS = 10.0
#: Steps without a request that may fail one after the other, and the pause after each.
MAX_EMPTY_FAILURES, EMPTY_FAILURE_SECONDS = 20, 0.05
#: So many requests that fail alone, one after the other, show that the worker is broken rather than all of them.
MAX_CULPRITS_IN_A_ROW = 8
#: The longest that the loop, with nothing else to do, waits for a grammar before it looks for new requests.
GRAMMAR_SECONDS = 0.005


class Engine:
    """One engine in the caller's process, whose thread makes all calls."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        connector: ConnectorScheduler,
        info: EngineInfo,
        merge: ResultMerge,
        culprit: Callable[[BaseException], str] = lambda error: "",
        wants_capture: bool = False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = info
        self.scheduler = scheduler
        self.executor = executor
        self._connector = connector
        self._merge = merge
        self._culprit, self._on_close = culprit, on_close
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._late: list[EngineOutput] = []  # which the next call of `step` returns
        self._journal = NullJournal()
        self._pause = Pause(scheduler.lifecycle)
        self._idle_capture = IdleCapture(wants_capture)
        self._waves = NoWaves()
        self._broken: set[str] | None = None  # the requests of a step that raised, until a step succeeds
        self._empty_failures = 0  # steps without a request that raised since then
        self._num_unrelated = 0  # steps that raised since then and had no request of the one before
        self._suspected = False
        self._steps = 0
        self._worked = False  # since the newest step began, rows were launched or answered
        self._step_seconds = 0.0
        self._busy_seconds = 0.0
        self._closed = False
        #: seconds that the loop may wait for requests before the next step, which only asks the KV connector
        self.patience = 0.0

    def watch(self, journal: NullJournal, suspects: Suspects) -> None:
        """Writes steps into `journal` and computes each of `suspects` alone; called before the first request."""
        journal.open(self.scheduler.lifecycle.batch.slots.num_slots)
        self._journal = journal
        self.scheduler.quarantine.suspect(suspects)
        self._suspected = bool(suspects)
        if not suspects:
            journal.clear()

    def step_with_peers(self, ask: Callable[[int], None]) -> None:
        """From now on steps only in waves, with other engines that share its experts; called before the first request.

        `ask(number)` is called when a wave must begin; `begin_wave` then tells every engine.
        """
        self._waves = Waves(self.scheduler.max_in_flight, ask)

    def begin_wave(self, number: int) -> None:
        """All engines step now, until none has requests; raises `ValueError` for an engine that steps alone."""
        self._waves.begin(number)

    def add(self, request: EngineRequest) -> None:
        """Queues a request; raises `ValueError` when it can never run, `RuntimeError` once the engine is closed."""
        if self._closed:
            raise RuntimeError("the engine is closed; start another one")
        self.scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored. Their last output comes with the next step."""
        self._late += self.scheduler.abort(request_ids)

    def has_unfinished(self) -> bool:
        """Whether requests are waiting or running, an output was not collected, or a connector still reads blocks."""
        if self._pause.stops_steps:
            return bool(self._in_flight or self._late or self._waves.running)
        busy = self.scheduler.lifecycle.requests or self.scheduler.has_transfers()
        return bool(busy or self._in_flight or self._late or self._waves.running)

    def has_idle_work(self) -> bool:
        """Whether `step`, with nothing unfinished, would ready workers for later requests, for up to some 100 ms."""
        return self._idle_capture.wanted and not self._pause.stops_steps

    def step(self) -> list[EngineOutput]:
        """Launches what can be launched and answers the oldest step; [] when nothing is left to do."""
        start = time.perf_counter()
        self._late += self.scheduler.constraints.admit()
        if self.scheduler.adapters.has_failed:
            self._late += self.scheduler.end_unread()
        answered = self._launch()
        outputs, self._late = self._late, []
        if self._in_flight and not answered:
            idle, num_loading = self._only_transfers(), len(self.scheduler.lifecycle.loading)
            outputs += self._answer(*self._in_flight.popleft())
            if idle and not outputs and len(self.scheduler.lifecycle.loading) >= num_loading:
                news.wait(IDLE_SECONDS)  # only a connector has work, and it is asked by steps without rows
                self.scheduler.use_pause()
        elif not (self._in_flight or outputs):
            if self.scheduler.quarantine.active:
                time.sleep(IDLE_SECONDS)  # suspects wait for their trial
            elif self.scheduler.adapters.is_reading:
                time.sleep(IDLE_SECONDS)
            else:
                self.scheduler.constraints.wait(GRAMMAR_SECONDS)
        if self._suspected and not self.scheduler.quarantine.active:
            self._suspected = False
            self._journal.clear()
        lifecycle = self.scheduler.lifecycle
        busy = outputs or lifecycle.requests or lifecycle.loading or lifecycle.finished_ids or self._waves.running
        self.patience = min(HOLD_SECONDS, 2 * self.patience + 0.001) if lifecycle.held and not busy else 0.0
        self.scheduler.events.flush()
        if self._worked:
            self._worked = False
            self._steps += 1
            self._step_seconds = time.perf_counter() - start
            self._busy_seconds += self._step_seconds
        return outputs

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        stats = self.scheduler.stats()
        stats.steps = self._steps
        stats.step_seconds = self._step_seconds if self.scheduler.lifecycle.requests else 0.0
        stats.busy_seconds = self._busy_seconds
        return stats

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls a control method by name: pauses, sleep, waves, profiles, reset_prefix_cache, update_weights, worker.

        `timeout` bounds what workers of other processes do for `worker`; raises `TimeoutError`.
        """
        arguments = dict(arguments or {})
        if method == "worker":
            name, limit = arguments.pop("method"), {} if timeout is None else {"timeout": timeout}
            return self.executor.call(name, arguments, **limit)
        control: dict[str, Callable[..., Any]] = {
            "pause": self._pause_requests,
            "resume": self._pause.end,
            "is_paused": lambda: self._pause.paused,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
            "is_sleeping": lambda: self._pause.asleep,
            "update_weights": self._update_weights,
            "begin_wave": self.begin_wave,
            "load_adapter": self.scheduler.adapters.load,
            "unload_adapter": self.scheduler.adapters.unload,
            "pin_adapter": self.scheduler.adapters.pin,
            "list_adapters": self.scheduler.adapters.list,
            "reset_prefix_cache": self._reset_prefix_cache,
            "end_session": self.scheduler.lifecycle.kept.drop,
            "start_profile": lambda **options: self.executor.call(method, options)[0],
            "stop_profile": lambda **options: self.executor.call(method, options)[0],
        }
        if method not in control:
            raise ValueError(f"no engine method {quoted(method)}; there are: {', '.join(sorted((*control, 'worker')))}")
        result = control[method](**arguments)
        self.scheduler.events.flush()
        return result

    def _pause_requests(self, mode: str = "keep", clear_cache: bool = False) -> int:
        """Holds requests back; returns how many still run. "abort" ends them first, "wait" lets them finish.

        The cache is cleared once none runs, so with "wait" perhaps only by a later call. Raises `RuntimeError` when it
        cannot be, and then requests are held back all the same.
        """
        self._pause.begin(mode)
        self._catch_up()
        if mode == "abort":
            self.abort(list(self.scheduler.lifecycle.requests))
        if clear_cache and not (mode == "wait" and self.scheduler.lifecycle.num_running):
            self._clear_cache()
        return self.scheduler.lifecycle.num_running

    def _sleep(self, keep: Sequence[str] = ("weights",)) -> None:
        """Frees the KV cache's memory, and the weights' unless kept; requests wait, and begin anew after waking.

        Transfers of a KV connector end first; raises `RuntimeError` when they do not. Where a worker raises, all are
        woken up; the engine sleeps on where that raises, too.
        """
        if self._pause.asleep:
            raise RuntimeError("the engine sleeps already")
        if self._waves.running:
            raise RuntimeError("engines that share experts still step: pause all of them, then let each sleep")
        self._catch_up()
        self._clear_cache()
        self.executor.call("end_transfers")  # where some worker refuses, no other has let go of its memory
        self._pause.sleep(keep)  # first: where some worker raises, others may sleep
        try:
            self.executor.call("sleep", {"keep": list(keep)})
        except Exception:
            self._wake_up()
            raise
        self.scheduler.lifecycle.give_up_abandoned()  # workers have stopped all loads

    def _wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Takes memory back; requests go on when all of it is there."""
        if not self._pause.asleep:
            return
        self.executor.call("wake_up", {"tags": list(tags)})
        if self.scheduler.lifecycle.abandoned and "kv_cache" in tags and all(self.executor.call("renew_cache")):
            self.scheduler.lifecycle.give_up_abandoned()  # of workers that slept while others raised nobody would hear
        self.scheduler.adapters.lose()
        self._pause.wake(tags)

    def _update_weights(self, **source: Any) -> None:
        """Serves other weights of the same model from now on; `source` as in `with_weights`."""
        if not isinstance(self._connector, NullConnectorScheduler):
            raise RuntimeError("the old weights serve on: a KV connector keeps blocks that they computed")
        self._catch_up()
        update_weights(self.executor, self.scheduler, source)

    def check(self) -> None:
        """Raises `RuntimeError` when a worker is dead."""
        self.executor.check()

    def progress(self) -> Progress | None:
        """Where its workers are, as `Executor.progress`; from any thread."""
        return self.executor.progress()

    def close(self) -> None:
        """Drops launched steps and stops the workers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._in_flight.clear()
        self._connector.close()
        self.scheduler.events.close()
        self.scheduler.constraints.close()
        self.executor.close()
        self._on_close()

    def _launch(self) -> bool:
        """Launches steps while there is room; returns whether that needed the answers of all earlier ones."""
        stopped = self._pause.stops_steps
        self._waves.look(not stopped and bool(self.scheduler.lifecycle.requests or self.scheduler.has_transfers()))
        if stopped and not self._waves.running:
            return False
        while self._waves.allows:
            if self._in_flight and self._only_transfers():
                return False  # its answer may let requests begin, and comes at once
            empty = self._waves.demands or (self._idle_capture.wanted and not self._in_flight)
            if not self._in_flight:
                news.forget()
            plan = self.scheduler.schedule(empty, admits=self._pause.admits, rows=not stopped, wait=_await_word)
            if plan is None:
                return False
            self._idle_capture.allow(plan)
            behind = bool(self._in_flight)
            if self._launch_one(plan) and behind:
                return True
        return False

    def _only_transfers(self) -> bool:
        """Whether the launched steps, which have no rows, ask a connector alone."""
        return not (self._waves.running or any(len(plan.slots) for plan, _ in self._in_flight))

    def _launch_one(self, plan: StepPlan) -> bool:
        """Launches a step; returns whether rows of it follow a grammar."""
        step = self.scheduler.constrained(plan)
        self._journal.launch(plan)
        self._worked |= bool(len(plan.slots))
        try:
            masks = b""
            if step is None:
                self.executor.execute(plan)
            else:
                masks = self._execute_constrained(step)
            self._in_flight.append((plan, self.executor.sample(masks)))
            self._waves.launched()
        except Exception as error:
            self._idle_capture.answer(plan, None)
            self._fail(plan, error)
            self._journal.retract()
        return step is not None

    def _execute_constrained(self, step: LaunchedStep) -> bytes:
        """Runs the forward pass while masks are filled, for which the tokens of all earlier steps must be known.

        They are waited for behind the launch of the forward pass; those that are here already are taken before, which
        helps where a launch blocks.
        """
        constraints = self.scheduler.constraints
        if all(handle.ready() for _, handle in self._in_flight):
            self._catch_up()
        fill = None if self._in_flight else constraints.begin(step, beside=True)
        try:
            self.executor.execute(step.plan)
        except BaseException:
            if fill is not None:
                fill.wait()
            raise
        if self._in_flight:
            self._catch_up()
            fill = constraints.begin(step, beside=False)
        if fill is None:
            return b""
        masks, failed = constraints.finish(fill)
        self._late += failed
        return masks

    def _catch_up(self) -> None:
        while self._in_flight:
            outputs = self._answer(*self._in_flight.popleft())  # which may take what is late along
            self._late += outputs

    def _answer(self, plan: StepPlan, handle: StepHandle) -> list[EngineOutput]:
        self._worked |= bool(len(plan.slots))
        try:
            result = self._merge.merge(handle.results())
        except Exception as error:
            self._idle_capture.answer(plan, None)
            self._fail(plan, error)
            self._journal.answer()
            outputs, self._late = self._late, []
            return outputs
        self._journal.answer()
        self._broken, self._empty_failures, self._num_unrelated = None, 0, 0
        self._idle_capture.answer(plan, result)
        self._waves.answered(result)
        return self.scheduler.update(plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """A failed step is tried again in halves until the request at fault is alone; it ends, the others go on.

        A dead worker ends the engine, as does a device that fails for good: then steps without a common request fail
        one after the other. So do steps without any request, as they are for a KV connector: nobody at fault can be
        found.
        """
        blamed = self._culprit(error)
        self.executor.check()
        logger.exception("step %d failed%s", plan.step, blamed and f" in {blamed}", exc_info=error)
        if self._waves.together:
            raise BrokenEngineError(f"a step failed in which other engines wait for this one: {error}") from error
        if not len(plan.slots):
            self._empty_failures += 1
            if self._empty_failures == MAX_EMPTY_FAILURES:
                raise BrokenEngineError(f"steps without requests fail one after the other: {error}") from error
            time.sleep(EMPTY_FAILURE_SECONDS)
        names = {request.request_id for request in self.scheduler.living(plan)}
        if names and self._broken is not None and names.isdisjoint(self._broken):
            self._num_unrelated += 1
            if self._num_unrelated == MAX_CULPRITS_IN_A_ROW or not self._device_answers():
                raise BrokenEngineError(f"steps of unrelated requests fail one after the other: {error}") from error
        self._broken = names or self._broken
        self._late += self.scheduler.fail(
            plan,
            f"an {f'error in {blamed}' if blamed else 'internal error'} ended the step; the engine's log has the cause",
        )

    def _device_answers(self) -> bool:
        """Whether the workers' devices do what they were given: some errors of a device stay until its process ends."""
        try:
            self.executor.call("synchronize")
        except Exception:
            return False
        return True

    def _clear_cache(self) -> None:
        """Forgets all prefixes; requests that run are computed anew later."""
        if not self._reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("the KV cache cannot be cleared: requests hold blocks")

    def _end_transfers(self) -> None:
        """Runs steps without tokens until no KV connector writes or reads blocks; raises `RuntimeError` if it goes on.

        Requires that no request runs. Loads of failed steps, which may never have begun, raise nothing.
        """
        latest = time.monotonic() + (0.0 if self._waves.together else TRANSFER_SECONDS)
        while self.scheduler.num_transfers:
            if time.monotonic() > latest:
                if self.scheduler.num_transfers == len(self.scheduler.lifecycle.abandoned):
                    return
                raise RuntimeError(
                    f"the KV connector still reads or writes blocks of {self.scheduler.num_transfers} requests "
                    f"after {TRANSFER_SECONDS:g} seconds; try again later"
                )
            self._journal.beat(idle=True)
            plan = self.scheduler.schedule(empty=True, admits=False)
            if plan is not None:
                self._launch_one(plan)
            self._catch_up()
            time.sleep(IDLE_SECONDS)

    def _reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._catch_up()
        if reset_running_requests:
            self.scheduler.preempt_all()
        if not self.scheduler.lifecycle.num_running:
            self._end_transfers()
        done = self.scheduler.reset_prefix_cache()
        if reset_connector:
            done = self._connector.reset() and done
        return done


def _await_word() -> None:
    """A connector's thread may answer within a fraction of what a step without rows takes."""
    news.wait(WORD_SECONDS)
