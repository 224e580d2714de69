"""The process executor: workers in processes of their own on this machine, so that host work overlaps with devices."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

from frame.interfaces import (
    DeadWorkerError,
    ExecutorSetup,
    Mesh,
    Placement,
    SpawnedWorker,
    StepHandle,
    StepOutcome,
    TeamExecutor,
    step_outcome,
)

#: Seconds that the other workers get to end a step in which one has failed: they may wait for it in a collective.
FAILED_STEP_SECONDS = 10.0


class ProcessExecutor(TeamExecutor):
    """Sends steps as msgpack over sockets; waits for an answer only when the engine asks for it."""

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        self._spawned: list[SpawnedWorker] = []
        self._trailing: list[tuple[int, StepHandle]] = []  # of steps that are answered, by workers still at them
        super().__init__(setup, options)

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        return None

    def make(self, placement: Placement) -> SpawnedWorker:
        self._spawned.append(self.workers.spawn(placement))
        return self._spawned[-1]

    def outcomes(self, handles: Sequence[StepHandle], answering: Sequence[int]) -> list[StepOutcome]:
        self._look_at_trailing()
        latest: float | None = None
        while True:
            found = [self._outcome(rank, handle) for rank, handle in enumerate(handles)]
            if all(found[rank] is not None for rank in answering):
                break
            if latest is None and any(isinstance(outcome, Exception) for outcome in found):
                latest = time.monotonic() + FAILED_STEP_SECONDS
            left = None if latest is None else latest - time.monotonic()
            if left is not None and left <= 0:
                break
            select.select(self._spawned, [], [], left)
        self._trailing += [(rank, handle) for rank, handle in enumerate(handles) if found[rank] is None]
        return found

    def close(self) -> None:
        for worker in self._spawned:
            worker.begin_close()
        super().close()

    def _outcome(self, rank: int, handle: StepHandle) -> StepOutcome:
        try:
            return step_outcome(handle) if handle.ready() else None
        except DeadWorkerError as error:
            raise self.named(rank, error) from None

    def _look_at_trailing(self) -> None:
        """Raises `DeadWorkerError` for a worker that failed where others did not: its state differs from theirs."""
        trailing, self._trailing = self._trailing, []
        for rank, handle in trailing:
            outcome = self._outcome(rank, handle)
            if outcome is None:
                self._trailing.append((rank, handle))
            elif isinstance(outcome, Exception):
                raise self.named(rank, DeadWorkerError(f"failed in a step that other workers ended: {outcome}"))
