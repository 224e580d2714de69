"""A step that one of several workers cannot end: whether that is the step's fault or a worker's is found out first."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from frame.core.interfaces.executor import DeadWorkerError
from frame.core.interfaces.mesh import Mesh
from frame.plugins.executors import process
from frame.plugins.executors.process import ProcessExecutor


class Worker:
    """A worker of which nothing is known but that it has a connection, and how its step ends after `seconds`."""

    def __init__(self, outcome=None, seconds=0.0):
        self._outcome, self._at = outcome, time.monotonic() + seconds
        self._engine_side, self._side = socket.socketpair()
        threading.Timer(seconds, self._side.close).start()

    def fileno(self):
        return self._engine_side.fileno()

    def sample(self, masks):
        return self

    def ready(self):
        if self._outcome is None or time.monotonic() < self._at:
            return False
        if isinstance(self._outcome, DeadWorkerError):
            raise self._outcome
        return True

    def results(self):
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def check(self):
        """It is not known to be dead."""

    def begin_close(self, *, kills):
        """The test closes it."""

    def close(self):
        self._engine_side.close()


@pytest.fixture
def team():
    made = []

    def executor(*workers):
        made.append(
            ProcessExecutor(
                SimpleNamespace(
                    placements=workers,
                    workers=SimpleNamespace(spawn=lambda placement: placement),
                    hang_seconds=60.0,
                    mesh=Mesh(tensor=len(workers)),
                )
            )
        )
        made[-1]._answering = [0]
        return made[-1]

    yield executor
    for one in made:
        one.close()


BROKEN = RuntimeError("connection closed by peer")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_that_fails_since_another_worker_died_ends_the_engine_and_no_request(team, order):
    workers = Worker(BROKEN), Worker(DeadWorkerError("its process has ended"), seconds=0.3)
    executor = team(*(workers[place] for place in order))
    with pytest.raises(DeadWorkerError, match=f"worker {order.index(1)} of 2: its process has ended"):
        executor.sample().results()
    assert executor.is_broken


def test_a_step_that_fails_on_all_workers_is_its_requests_fault(team):
    executor = team(Worker(BROKEN), Worker(BROKEN, seconds=0.1))
    with pytest.raises(RuntimeError, match="worker 0 of 2: connection closed by peer"):
        executor.sample().results()
    assert not executor.is_broken


def test_a_worker_that_still_runs_a_failed_step_is_named_in_time(team, monkeypatch):
    monkeypatch.setattr(process, "FAILED_STEP_SECONDS", 0.2)
    executor = team(Worker(BROKEN), Worker())
    with pytest.raises(DeadWorkerError, match=r"^worker 1 did not end a step that failed: worker 0 of 2: connection"):
        executor.sample().results()
    assert executor.is_broken


def test_a_failed_step_is_not_waited_for_until_the_parent_ends_the_engine(team, monkeypatch):
    """Which could not say why it ended."""
    executor = team(Worker(BROKEN), Worker())
    monkeypatch.setattr(executor, "_step_seconds", 0.2)
    start = time.monotonic()
    with pytest.raises(DeadWorkerError, match=r"^worker 1 did not end a step that failed: worker 0 of 2: connection"):
        executor.sample().results()
    assert time.monotonic() - start < process.FAILED_STEP_SECONDS


def test_a_worker_that_does_not_answer_is_not_waited_for(team):
    executor = team(Worker(["tokens"]), Worker())
    assert executor.sample().results() == ["tokens"]
