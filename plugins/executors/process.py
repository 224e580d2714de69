"""The process executor: workers in processes of their own on this machine, so that host work overlaps with devices.

Several workers are told everything by one broadcast through shared memory, a single one by its socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from frame.interfaces import (
    DeadWorkerError,
    ExecutorSetup,
    KVLayout,
    Mesh,
    Placement,
    SpawnedTeam,
    SpawnedWorker,
    StepHandle,
    StepOutcome,
    StepPlan,
    TeamExecutor,
    WorkerReady,
    step_outcome,
)
from frame.links.polling import wait_for

from .process_options import ProcessOptions

T = TypeVar("T")

#: Seconds without a sign of life after which a process is taken to be stopped.
SILENT_SECONDS = 3.0
#: Of the seconds after which the engine's parent ends an engine whose steps do not end.
SHARE_OF_HANG = 0.8
#: Seconds that the other workers get to end a step in which one has failed: they may wait for it in a collective.
FAILED_STEP_SECONDS = 10.0


class ProcessExecutor(TeamExecutor):
    """Sends steps as msgpack; waits for an answer only when the engine asks for it."""

    def __init__(self, setup: ExecutorSetup, options: ProcessOptions | None = None) -> None:
        self._spawned: list[SpawnedWorker] = []
        self._joined: SpawnedTeam | None = None
        self._trailing: list[tuple[int, StepHandle]] = []  # of steps that are answered, by workers still at them
        options = options or ProcessOptions()
        # the worker is named before the engine's parent, which cannot name it, ends the engine
        self._step_seconds = min(options.step_timeout_seconds, SHARE_OF_HANG * setup.hang_seconds)
        super().__init__(setup, options)

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        return None

    def make(self, placement: Placement) -> SpawnedWorker:
        self._spawned.append(self.workers.spawn(placement))
        return self._spawned[-1]

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        ready = super().allocate(layout)
        if len(self._spawned) > 1:
            self._joined = self.workers.join(self._spawned)
        return ready

    def execute(self, plan: StepPlan) -> None:
        if (team := self._joined) is None:
            super().execute(plan)
        else:
            self._tell(lambda: team.execute(plan))

    def launch_draws(self, masks: bytes) -> list[StepHandle]:
        if (team := self._joined) is None:
            return super().launch_draws(masks)
        return self._tell(lambda: team.sample(masks))

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        if (team := self._joined) is None:
            return super().call(method, arguments, timeout)
        return self._tell(lambda: team.call(method, arguments, timeout))

    def _tell(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except DeadWorkerError as error:
            dead = self._known_death() or error
            raise self.broken(str(dead), killed=dead.killed) from None

    def _known_death(self) -> DeadWorkerError | None:
        """What is known of the first worker that is gone, None where all are there."""
        try:
            self.check()
        except DeadWorkerError as error:
            return error
        return None

    def outcomes(self, handles: Sequence[StepHandle], answering: Sequence[int]) -> list[StepOutcome]:
        self._look_at_trailing()
        latest, hangs_at = None, time.monotonic() + self._step_seconds
        while True:
            found = [self._outcome(rank, handle) for rank, handle in enumerate(handles)]
            failed = any(isinstance(outcome, Exception) for outcome in found)
            # a step that fails on one worker often does so since another has died, of which its own end tells later
            if all(found[rank] is not None for rank in (range(len(found)) if failed else answering)):
                break
            if latest is None and failed:
                latest = min(time.monotonic() + FAILED_STEP_SECONDS, hangs_at)
            left = (hangs_at if latest is None else latest) - time.monotonic()
            if left <= 0 and latest is None:
                raise self._hanging([rank for rank, outcome in enumerate(found) if outcome is None])
            if left <= 0:
                break
            wait_for(self._spawned, seconds=left)
        self._trailing += [(rank, handle) for rank, handle in enumerate(handles) if found[rank] is None]
        return found

    def close(self) -> None:
        for worker in self._spawned:
            worker.begin_close(kills=self.is_broken)
        super().close()
        if self._joined is not None:
            self._joined.close()

    def _outcome(self, rank: int, handle: StepHandle) -> StepOutcome:
        try:
            return step_outcome(handle) if handle.ready() else None
        except DeadWorkerError as error:
            named = self.named(rank, error)
            raise self.broken(str(named), killed=getattr(named, "killed", error.killed)) from None

    def _hanging(self, late: Sequence[int]) -> DeadWorkerError:
        """Names the worker that the others most probably wait for; those `late` have not answered."""
        count, seconds = len(self._spawned), self._step_seconds
        silent = [worker.silent_seconds() for worker in self._spawned]
        worst = max(range(count), key=silent.__getitem__)
        if silent[worst] > SILENT_SECONDS:
            return self._hangs(worst, f"its process has not run for {silent[worst]:.0f} seconds")
        known = {
            rank: found[:2] for rank, worker in enumerate(self._spawned) if (found := worker.progress()) is not None
        }
        behind = self._behind({rank: known[rank] for rank in late if rank in known})
        (step, calls), (newest, most) = known.get(behind, (0, 0)), max(known.values(), default=(0, 0))
        if (step, calls) < (newest, most):
            why = f"it is at step {step} and collective {calls} of it, others at step {newest} and collective {most}"
            return self._hangs(behind, why)
        if unknown := [str(rank) for rank in range(count) if rank not in known]:
            return self.broken(
                f"no worker answered a step for {seconds:g} seconds; those of this machine run and have called the "
                f"same collectives, so that they wait for {'worker' if len(unknown) == 1 else 'one of the workers'} "
                f"{', '.join(unknown)} of {count} elsewhere, or a device or the network hangs"
            )
        if self.setup.mesh.pipeline > 1:
            return self._hangs(behind, f"it is at step {step}, and later stages wait for what it hands on")
        engines = "an engine that shares the experts, " if self.setup.mesh.data > 1 else ""
        return self.broken(
            f"no worker answered a step for {seconds:g} seconds; all {count} run and have called the same collectives, "
            f"so that {engines}a device or the network hangs"
        )

    def _behind(self, late: Mapping[int, tuple[int, int]]) -> int:
        """The worker that is behind others of its stage, which call the same collectives; else of the stages one."""
        for rank, at in late.items():
            peers = (late[peer] for peer in self.setup.mesh.ranks("tensor", rank) if peer in late)
            if at < max(peers):
                return rank
        return min(late, key=late.__getitem__, default=0)  # of equal ones the first: stages wait for those before

    def _hangs(self, rank: int, why: str) -> DeadWorkerError:
        count, seconds = len(self._spawned), self._step_seconds
        return self.broken(f"worker {rank} of {count} hangs, no step was answered for {seconds:g} seconds: {why}")

    def _look_at_trailing(self) -> None:
        """Raises `DeadWorkerError` for a worker that failed where others did not: its state differs from theirs."""
        trailing, self._trailing = self._trailing, []
        for rank, handle in trailing:
            outcome = self._outcome(rank, handle)
            if outcome is None:
                self._trailing.append((rank, handle))
            elif isinstance(outcome, Exception):
                raise self.broken(f"worker {rank} failed in a step that other workers ended: {outcome}")


def against_shared_experts(mesh: Mesh) -> str | None:
    """None unless `mesh` spans engines: then why it suits no executor whose workers meet those of one engine alone."""
    if mesh.data == 1:
        return None
    return f"its workers meet those of their own engine alone, and {mesh.data} engines share experts"
