"""Executors of one fake worker and of the ranks of a fake model, and a factory of fake workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from frame.core.interfaces.executor import Executor, SpawnedTeam, SpawnedWorker, StepHandle, WorkerFacts, WorkerReady
from frame.core.interfaces.executor_team import TeamExecutor
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.step import StepPlan

from .fake_worker import FakeWorker


class FakeExecutor(Executor):
    """One worker, called directly."""

    def load(self) -> list[WorkerFacts]:
        self.worker = self.workers.local(self.setup.placements[0])
        return [self.worker.load()]

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        return [self.worker.allocate(layout)]

    def execute(self, plan: StepPlan) -> None:
        self.worker.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        return self.worker.sample(masks)

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        return [self.worker.call(method, arguments, timeout)]

    def close(self) -> None:
        self.worker.close()


class FakeRanks(TeamExecutor):
    """The tensor ranks of one model, layer by layer: a row that reads a wrong block on one rank is wrong on all."""

    def make(self, placement: Placement) -> FakeWorker:
        return cast(FakeWorker, self.workers.local(placement))

    def execute(self, plan: StepPlan) -> None:
        ranks = cast("list[FakeWorker]", self.team)
        steps = [worker.layers(plan) for worker in ranks]
        going, errors = True, list[Exception]()
        while going:
            going = False
            for step in steps:
                try:
                    going |= next(step, self) is not self
                except Exception as error:  # the others come to the same place
                    errors.append(error)
            for slot in plan.slots.tolist():
                rows = [worker.slots[slot] for worker in ranks if slot in worker.slots]
                for row in rows:
                    row.spoiled = any(other.spoiled for other in rows)
        if errors:
            raise errors[0]


class FakeTeam:
    """Implements `SpawnedTeam` by calling each worker in turn."""

    def __init__(self, workers: Sequence[SpawnedWorker]) -> None:
        self._workers = workers

    def execute(self, plan: StepPlan) -> None:
        """To every worker."""
        for worker in self._workers:
            worker.execute(plan)

    def sample(self, masks: bytes = b"") -> list[StepHandle]:
        """From every worker."""
        return [worker.sample(masks) for worker in self._workers]

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        """Of every worker."""
        return [worker.call(method, arguments, timeout) for worker in self._workers]

    def close(self) -> None:
        """Fake workers share nothing."""


class FakeWorkers:
    """Implements `WorkerFactory` with workers of this process, local or not; `made` holds them in order."""

    def __init__(self, make: Callable[[int], FakeWorker] = lambda rank: FakeWorker(rank=rank)) -> None:
        self._make = make
        self.made: list[FakeWorker] = []

    def local(self, placement: Placement) -> FakeWorker:
        """A worker."""
        self.made.append(self._make(placement.rank))
        return self.made[-1]

    def spawn(self, placement: Placement) -> FakeWorker:
        """A worker in this process, too: fake workers have no process of their own."""
        return self.local(placement)

    def join(self, workers: Sequence[SpawnedWorker]) -> SpawnedTeam:
        """These workers, called in turn."""
        return FakeTeam(workers)

    def recipe(self, placement: Placement) -> bytes:
        """Fake workers live in this process only."""
        raise NotImplementedError(f"fake worker {placement.rank} cannot be made in another process")
