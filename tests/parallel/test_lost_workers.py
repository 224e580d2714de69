"""A worker that dies or hangs, at any moment, ends its engine soon and is named; nothing of the engine stays."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.assembly import EngineStart
from frame.core.interfaces.executor import DeadWorkerError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.factory import Workers
from frame.offline.in_process import make_engine
from frame.plugins.executors.process import SHARE_OF_HANG
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request
from frame.testing.executor_suite import children
from tests.parallel.stalling import STALLS, offer

STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
TIMEOUT = {"plugin": {"process": {"step_timeout_seconds": 4.0}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("lost"), "llama")


def start(folder, **settings):
    values = {"model": str(folder), "tensor_parallel_size": 2, "num_threads": 1, **SMALL, **settings}
    return make_engine(from_flat(values), Registry.load())


def processes(engine):
    return [worker._process for worker in engine.executor.team]


def step_for(engine, seconds):
    latest = time.monotonic() + seconds
    while time.monotonic() < latest:
        engine.step()


def memory() -> list[str]:
    """What this process holds of memory that others may share."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    shared = (one for one in os.listdir("/dev/shm") if not one.startswith("sem."))  # of other programs, at any moment
    return sorted([*(one for one in found if "memfd:frame" in one), *shared])


@pytest.fixture(autouse=True)
def no_memory_stays():
    before = memory()
    yield
    assert memory() == before


def ends(engine, pattern, seconds):
    """Steps until the engine ends with such an error, within so many seconds; closes it."""
    began = time.monotonic()
    with pytest.raises(DeadWorkerError, match=pattern):
        step_for(engine, 30)
    engine.close()
    assert time.monotonic() - began < seconds
    assert all(process.poll() is not None for process in processes(engine))


@pytest.mark.some(1)
@pytest.mark.product
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 4], ids=["before a step", "in the prompt", "in decodes"])
def test_a_killed_worker_is_named_at_once(folder, rank, steps):
    engine = start(folder)
    for place, prompt in enumerate(prompts(400)):
        engine.add(request(str(place), prompt, 60))
    for _ in range(steps):
        engine.step()
    processes(engine)[rank].kill()
    ends(engine, f"worker {rank} of 2: the worker process died with exit status -9|did not end a step", 40)


@pytest.mark.matrix
def test_a_stopped_worker_is_named_by_its_silence(folder):
    engine = start(folder, **TIMEOUT)
    engine.add(request("a", prompts(400)[0], 60))
    engine.step()
    os.kill(processes(engine)[1].pid, signal.SIGSTOP)
    ends(
        engine, r"worker 1 of 2 hangs, no step was answered for 4 seconds: its process has not run for \d+ seconds", 40
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        pytest.param({}, 0, marks=pytest.mark.matrix, id="tensor rank 0"),
        pytest.param({}, 1, id="tensor rank 1"),
        pytest.param(STAGES, 0, id="first stage"),
        pytest.param(STAGES, 1, marks=pytest.mark.matrix, id="last stage"),
        pytest.param({"pipeline_parallel_size": 2}, 1, marks=pytest.mark.matrix, id="tensor rank of the first stage"),
        pytest.param({"pipeline_parallel_size": 2}, 2, marks=pytest.mark.matrix, id="tensor rank of the last stage"),
    ],
)
def test_a_worker_that_never_comes_to_a_collective_is_named(folder, settings, rank, monkeypatch):
    """After steps in which stages have called unlike many; well before the engine's parent would end the engine."""
    offer(monkeypatch)
    engine = start(folder, **STALLS, hang_seconds=2.0 / SHARE_OF_HANG, **settings)
    drain(engine, [request("before", prompts(400)[1], 9)])
    engine.call("worker", {"method": "stall", "rank": rank})
    engine.add(request("a", prompts(400)[0], 60))
    told = (
        r"it is at step \d+(, and later stages wait| and collective \d+ of it, others at step \d+ and collective \d+)"
    )
    ends(engine, rf"worker {rank} of \d hangs, no step was answered for 2 seconds: {told}", 40)


@pytest.mark.matrix
@pytest.mark.some(1)
@pytest.mark.parametrize("killed", [0, 1], ids=["the one that waits", "the one that never comes"])
def test_a_worker_that_is_killed_in_a_collective_is_named_at_once(folder, killed, monkeypatch):
    offer(monkeypatch)
    engine = start(folder, **STALLS)
    engine.call("worker", {"method": "stall", "rank": 1})
    engine.add(request("a", prompts(400)[0], 60))
    threading.Timer(1.0, processes(engine)[killed].kill).start()
    ends(engine, f"worker {killed} of 2: the worker process died with exit status -9", 10)


def test_a_worker_that_cannot_start_is_named_with_the_cause_and_leaves_nothing(folder, monkeypatch):
    offer(monkeypatch)
    before = children()
    with pytest.raises(RuntimeError) as raised:
        start(folder, worker_extension="fails-on-one")
    assert str(raised.value) == (
        "worker 1 of 2: worker extension 'fails-on-one' of package this-process cannot be built: this rank has no luck"
    )
    assert not children() - before


def test_a_worker_that_dies_while_it_loads_ends_the_start(folder):
    before = children()
    killed = []

    def kill() -> None:
        deadline = time.monotonic() + 100
        while len(found := sorted(children() - before)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        killed.append(found[1])
        os.kill(found[1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    began = time.monotonic()
    with pytest.raises(DeadWorkerError, match="worker 1 of 2: the worker process died with exit status -9"):
        start(folder)
    thread.join()
    assert time.monotonic() - began < 100
    assert not children() - before


@pytest.mark.matrix
def test_an_engine_that_stands_by_waits_for_its_workers_libraries(folder):
    before = children()
    config = from_flat({"model": str(folder), "tensor_parallel_size": 2, "num_threads": 1, **SMALL})
    standby = EngineStart(config, Registry.load(), Workers)
    team = standby._executor.team
    assert all(worker._heartbeat.silent_seconds() == 0 for worker in team), "they have begun to beat"
    standby.await_workers()
    assert all(worker._heartbeat.silent_seconds() > 0 for worker in team)
    team[1]._process.kill()
    with pytest.raises(DeadWorkerError, match="worker 1 of 2: the worker process died with exit status -9"):
        standby.await_workers()
    assert not children() - before


def test_workers_do_not_outlive_a_killed_engine(folder, tmp_path):
    import subprocess
    import sys

    code = f"""
import sys, time
from frame import LLM
llm = LLM(model={str(folder)!r}, skip_tokenizer_init=True, tensor_parallel_size=2, num_threads=1, **{SMALL!r})
print(*(worker._process.pid for worker in llm.llm_engine.core.executor.team), flush=True)
time.sleep(60)
"""
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)  # the other one will wait for it for good
    engine.kill()
    engine.wait()
    engine.stdout.close()
    os.kill(workers[1], signal.SIGCONT)
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)
