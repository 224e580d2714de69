"""The workers of one engine in processes of their own: each message is encoded once for all of them.

It reaches workers of this machine by a broadcast through shared memory, and by the socket of each where some are on
other machines. Everything that the engine tells its workers once they are joined takes this way, steps and calls, so
that all workers do it in the same order. Answers come by the socket of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from frame.links.polling import wait_for
from frame.links.step_messages import Execute, Sample

from ..interfaces.executor import DeadWorkerError, SpawnedWorker, StepHandle
from ..interfaces.executor_team import named_error
from ..interfaces.step import StepPlan
from ..processes.broadcast import BroadcastWriter, RingShape
from ..processes.channel import Channel, pack, send_to_all
from .channel_worker import Call, ChannelWorker, WorkerError, refuse_callables, unanswered
from .worker_process import RemoteWorker

#: Seconds that a worker may be so late that the ring is full. Steps in flight are few, so that it hangs then.
LATE_SECONDS = 300.0
#: Seconds that the other workers get to answer a call in which one has failed: they may wait for it in a collective.
FAILED_CALL_SECONDS = 10.0


class SocketWriter:
    """As `BroadcastWriter`, by sockets alone."""

    def write(
        self,
        message: Execute | Sample | Call,
        channels: Sequence[Channel],
        *,
        check: Callable[[int], None],
        timeout: float | None,
        apart: bool,
    ) -> None:
        """Gives `message` to all, encoded once; raises as `BroadcastWriter.write` does."""
        del apart
        send_to_all(channels, pack(message), check, timeout)

    def close(self) -> None:
        """The sockets are the workers'."""


class WorkerTeam:
    """Implements `frame.interfaces.SpawnedTeam`."""

    def __init__(self, workers: Sequence[SpawnedWorker]) -> None:
        self._workers: list[ChannelWorker] = [worker for worker in workers if isinstance(worker, ChannelWorker)]
        if len(self._workers) != len(workers):
            raise TypeError("only workers that the same factory spawned or connected can be joined")
        self._channels = [worker.channel for worker in self._workers]
        self._writer: BroadcastWriter | SocketWriter = SocketWriter()
        here = [worker for worker in workers if isinstance(worker, RemoteWorker)]
        if len(here) == len(self._workers):
            self._writer = ring = BroadcastWriter(RingShape(len(here)))
            try:
                for rank, worker in enumerate(here):
                    worker.attach(ring, rank)
            except BaseException:
                self.close()
                raise

    def execute(self, plan: StepPlan) -> None:
        self._write(Execute.of(plan))

    def sample(self, masks: bytes = b"") -> list[StepHandle]:
        self._write(Sample.of(masks))
        return [worker.expect_step() for worker in self._workers]

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        refuse_callables(method, arguments)
        for worker in self._workers:
            worker.expect_value()
        latest = None if timeout is None else time.monotonic() + timeout
        self._write(Call(method, arguments))
        answers: dict[int, Any] = {}
        error: Exception | None = None
        while len(answers) < len(self._workers):
            for rank in range(len(self._workers)):
                if rank not in answers and self._answered(rank):
                    try:
                        answers[rank] = self._workers[rank].take_value()
                    except WorkerError as raised:
                        answers[rank] = error = error or self._named(rank, raised)
                        latest = min(latest or float("inf"), time.monotonic() + FAILED_CALL_SECONDS)
            waiting = [worker for rank, worker in enumerate(self._workers) if rank not in answers]
            left = None if latest is None else latest - time.monotonic()
            if waiting and left is not None and left <= 0:
                for worker in waiting:
                    worker.forget_value()
                late = self._workers.index(waiting[0])
                raise error or self._named(late, TimeoutError(unanswered(method, timeout)))
            if waiting:
                wait_for(waiting, seconds=left)
        if error is not None:
            raise error
        return [answers[rank] for rank in range(len(self._workers))]

    def close(self) -> None:
        self._writer.close()

    def _answered(self, rank: int) -> bool:
        try:
            return self._workers[rank].has_value()
        except DeadWorkerError as error:
            raise self._named(rank, error) from None

    def _check(self, rank: int) -> None:
        """Takes what a worker has sent, which may keep it from reading, and raises when it is dead."""
        try:
            self._workers[rank].read_arrived()
            self._workers[rank].check()
        except DeadWorkerError as error:
            raise self._named(rank, error) from None

    def _named(self, rank: int, error: Exception) -> Exception:
        return named_error(rank, len(self._workers), error)

    def _write(self, message: Execute | Sample | Call) -> None:
        # the arguments of a call have no declared type, so that their arrays could not be found apart
        apart = not isinstance(message, Call)
        try:
            self._writer.write(message, self._channels, check=self._check, timeout=LATE_SECONDS, apart=apart)
        except TimeoutError as error:
            raise DeadWorkerError(f"workers hang: {error}") from None
        except OSError as error:  # the end of a worker that had not been read yet
            for rank in range(len(self._workers)):
                self._check(rank)
            raise DeadWorkerError(f"a worker cannot be reached: {error}") from None
