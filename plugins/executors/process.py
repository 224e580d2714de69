"""The process executor: one worker in a process of its own, so that host work overlaps with the device."""

from __future__ import annotations

from typing import Any

from frame.interfaces import Executor, ExecutorSetup, KVLayout, StepHandle, StepPlan, WorkerFacts, WorkerReady


class ProcessExecutor(Executor):
    """Sends steps as msgpack over a socket; waits for an answer only when the engine asks for it."""

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._worker = self.workers.spawn(setup.placements[0])

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

    def check(self) -> None:
        self._worker.check()

    def close(self) -> None:
        self._worker.close()
