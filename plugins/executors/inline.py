"""The inline executor: one worker in the engine's own process."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Executor, ExecutorSetup, KVLayout, StepHandle, StepPlan, WorkerFacts, WorkerReady


class InlineExecutor(Executor):
    """Calls the worker directly; steps still overlap, because the device works while the host plans the next step."""

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._worker = self.workers.local(setup.placements[0])

    def load(self) -> list[WorkerFacts]:
        return [self._worker.load()]

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        return [self._worker.allocate(layout)]

    def execute(self, plan: StepPlan) -> None:
        self._worker.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        return self._worker.sample(masks)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        return [self._worker.call(method, arguments, timeout)]

    def close(self) -> None:
        self._worker.close()
