"""An executor whose workers are threads of the engine's process: tests of several ranks without several processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from frame.core.interfaces.executor import Progress, StepHandle, WorkerFacts, WorkerProtocol, WorkerReady
from frame.core.interfaces.executor_team import TeamExecutor
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.mesh import Mesh, Placement
from frame.core.interfaces.provider import API_VERSION, Provider
from frame.core.interfaces.step import StepPlan, StepResult
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry


def with_threads(registry: Registry) -> Registry:
    """`registry`, to which the executor "threads" is added."""
    target = f"{ThreadExecutor.__module__}:ThreadExecutor"
    registry.offers.append(Offer("executor", Provider("threads", target, api=f"=={API_VERSION}"), HERE, ""))
    return registry


class ThreadExecutor(TeamExecutor):
    """Ranks run at the same time, each in a thread of its own. For the CPU: kernel launches of threads may mix."""

    is_local = True

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        return None

    def make(self, placement: Placement) -> WorkerProtocol:
        return ThreadWorker(lambda: self.workers.local(placement))


class ThreadWorker:
    """Implements `WorkerProtocol` by a worker that is made and called in one thread."""

    def __init__(self, make: Callable[[], WorkerProtocol]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="frame-worker", daemon=True)
        self._thread.start()
        self._worker: WorkerProtocol = self._submit(make).result()

    def load(self) -> WorkerFacts:
        facts: WorkerFacts = self._submit(self._worker.load).result()
        return facts

    def allocate(self, layout: KVLayout) -> WorkerReady:
        ready: WorkerReady = self._submit(lambda: self._worker.allocate(layout)).result()
        return ready

    def execute(self, plan: StepPlan) -> None:
        self._executed = self._submit(lambda: self._worker.execute(plan))

    def sample(self, masks: bytes = b"") -> StepHandle:
        executed = self._executed

        def sample() -> list[StepResult]:
            executed.result()
            return self._worker.sample(masks).results()

        return ThreadStep(self._submit(sample))

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        return self._submit(lambda: self._worker.call(method, arguments, timeout)).result()

    def check(self) -> None:
        self._worker.check()

    def progress(self) -> Progress | None:
        return self._worker.progress()

    def close(self) -> None:
        if self._thread.is_alive():
            self._submit(self._worker.close).result()
            self._calls.put(None)
            self._thread.join()

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)


class ThreadStep:
    """A step that a thread runs."""

    def __init__(self, future: Future[list[StepResult]]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def results(self) -> list[StepResult]:
        return self._future.result()
