"""Two worker processes that are told everything by one broadcast do what one worker does, in the same order."""

import io
import os
import signal
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.executor import DeadWorkerError
from frame.core.interfaces.step import StepResult
from frame.core.plugin_host.registry import Registry
from frame.core.processes.broadcast import BroadcastWriter, RingShape
from frame.core.processes.channel import Channel
from frame.core.worker import worker_process, worker_team
from frame.core.worker.channel_worker import Attach, Call, FromWorker, Sampled, ToWorker, Value
from frame.core.worker.worker_process import _serve, _WorkerLoop
from frame.core.worker.worker_team import WorkerTeam
from frame.links import lookout
from frame.links.step_messages import Execute, Sample
from frame.testing.checkpoints import make_checkpoint
from frame.testing.connector_suite import empty_plan
from frame.testing.engines import SMALL, drain, every_kind, prompts, running, tokens_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("team"), "llama", tokenizer=True)


def engine(folder, size):
    values = {**SMALL, "model": str(folder), "num_threads": 1, "tensor_parallel_size": size}
    values["executor"] = "inline" if size == 1 else "process"
    return running(from_flat(values), Registry.load())


def served(one):
    outputs = drain(one, every_kind(prompts(400), 3))
    return {name: tokens_of(found) for name, found in outputs.items()}


@pytest.fixture(scope="module")
def expected(folder):
    with engine(folder, 1) as one:
        return served(one)


@pytest.fixture(scope="module")
def two(folder):
    with engine(folder, 2) as made:
        yield made


def test_two_workers_give_the_tokens_of_one_with_grammars(two, expected):
    assert isinstance(two.executor._joined, WorkerTeam)
    sent = two.executor._joined._writer._count
    assert served(two) == expected
    assert two.executor._joined._writer._count > sent + 20


@pytest.mark.matrix
def test_messages_larger_than_a_chunk_give_the_same_tokens(folder, expected, monkeypatch):
    monkeypatch.setattr(worker_team, "RingShape", partial(RingShape, num_chunks=2, chunk_bytes=512))
    with engine(folder, 2) as small:
        assert served(small) == expected


def test_calls_reach_all_and_errors_name_the_worker(two):
    assert [facts["platform"] for facts in two.executor.call("describe")] == ["cpu", "cpu"]
    with pytest.raises(RuntimeError, match=r"worker [01] of 2: no worker method 'fly'"):
        two.executor.call("fly")
    with pytest.raises(ValueError, match="run: function is a callable, which cannot travel"):
        two.executor.call("run", {"function": print})
    with pytest.raises(RuntimeError, match="this worker takes its messages from a broadcast"):
        two.executor.team[1].call("describe")
    assert len(two.executor.call("describe")) == 2


def test_a_call_that_one_worker_is_late_with_ends_and_steps_follow_it(two, expected):
    pid = two.executor.team[1]._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=r"worker 1 of 2: a worker did not answer describe within 0\.2 seconds"):
            two.executor.call("describe", timeout=0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert served(two) == expected
    assert len(two.executor.call("describe", timeout=60)) == 2


class Recorded:
    """A worker that writes down what it is told."""

    def __init__(self):
        self.told = []

    def execute(self, plan):
        self.told.append(plan.step)
        if plan.step == 13:
            raise ValueError("unlucky")

    def sample(self, masks):
        self.told.append(bytes(masks))
        result = StepResult(step=0, token_ids=np.zeros((0, 1), np.int32), num_tokens=np.zeros(0, np.int32))
        return SimpleNamespace(results=lambda: [result], ready=lambda: True)

    def call(self, method, arguments):
        self.told.append(method)
        return arguments


def test_steps_masks_and_calls_keep_their_order():
    """Over a ring of two chunks, which is always full, with masks that do not fit into a chunk."""
    ours, theirs = socket.socketpair()
    engine_side, worker_side = Channel(ours, FromWorker), Channel(theirs, ToWorker)
    writer = BroadcastWriter(RingShape(1, num_chunks=2, chunk_bytes=2048))
    worker = Recorded()
    serving = threading.Thread(target=_serve, args=[_WorkerLoop(worker, worker_side), worker_side])
    serving.start()
    try:
        engine_side.send(Attach(writer.shape, 0))
        engine_side.send_descriptors(writer.descriptors(0))
        assert isinstance(engine_side.receive(), Value)
        answers, expected = [], []

        def take(reader):
            while engine_side.readable():
                answers.append(engine_side.receive())

        for step in range(60):
            masks = bytes([step]) * (step * 101)
            messages = [Execute.of(empty_plan(step)), Sample.of(masks)]
            expected += [step, *([] if step == 13 else [masks])]
            if step % 7 == 0:
                messages.append(Call("echo", {"step": step}))
                expected.append("echo")
            for message in messages:
                writer.write(message, [engine_side], check=take, timeout=30)
        deadline = time.monotonic() + 30
        while len(answers) < 60 + 9 and time.monotonic() < deadline:
            engine_side.readable(1)
            take(0)
        assert worker.told == expected
        assert [answer.value["step"] for answer in answers if isinstance(answer, Value)] == list(range(0, 60, 7))
        assert sum(isinstance(answer, Sampled) for answer in answers) == 59
        assert [answer.message for answer in answers if not isinstance(answer, (Value, Sampled))] == ["unlucky"]
    finally:
        engine_side.close()
        serving.join()
        worker_side.close()
        writer.close()


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_worker_looks_for_messages_as_long_as_its_setting_says(seconds, monkeypatch):
    """Without seconds it never gives its processor away between two looks, since it sleeps at once."""
    looks = []
    monkeypatch.setattr(lookout, "os", SimpleNamespace(sched_yield=lambda: looks.append(time.sleep(1e-4))))
    ours, theirs = socket.socketpair()
    engine_side, worker_side = Channel(ours, FromWorker), Channel(theirs, ToWorker)
    writer = BroadcastWriter(RingShape(1))
    loop = _WorkerLoop(Recorded(), worker_side, poll_seconds=seconds)
    serving = threading.Thread(target=_serve, args=[loop, worker_side])
    serving.start()
    try:
        engine_side.send(Attach(writer.shape, 0))
        engine_side.send_descriptors(writer.descriptors(0))
        assert isinstance(engine_side.receive(), Value)
        latest = time.monotonic() + 30
        for step in range(5000):
            if step >= 5 and (looks or seconds == 0.0 or time.monotonic() > latest):
                break
            time.sleep(0.002)  # longer than the worker takes: it has to wait
            writer.write(Call("echo", {"step": step}), [engine_side], check=lambda reader: None, timeout=30)
            assert engine_side.receive() == Value({"step": step})
        assert bool(looks) is (seconds > 0)
    finally:
        engine_side.close()
        serving.join()
        worker_side.close()
        writer.close()


def test_a_worker_process_takes_the_setting_of_its_configuration(monkeypatch):
    config, made = from_flat({"worker_poll_seconds": 0.25}), []
    worker = SimpleNamespace(config=config, registry=Registry.load(), progress=None, close=lambda: None)
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker_process, "worker_of", lambda *given: worker)
    monkeypatch.setattr(worker_process, "Heartbeat", lambda *given: None)

    def serve(loop, channel):
        made.append(loop.poll_seconds)
        channel.close()

    monkeypatch.setattr(worker_process, "_serve", serve)
    monkeypatch.setattr(worker_process, "signal", SimpleNamespace(signal=lambda *given: None, SIGINT=2, SIG_IGN=1))
    given = io.BytesIO(b"\na recipe")
    source = SimpleNamespace(readline=given.readline, readall=given.read)
    monkeypatch.setattr(worker_process, "io", SimpleNamespace(FileIO=lambda *_, **__: source))
    monkeypatch.setattr(worker_process, "_end_when_unwanted", lambda loaded: None)
    with ours:
        assert worker_process.serve_worker(theirs.detach(), -1) == 0
    assert made == [0.25]


@pytest.mark.parametrize("seconds", [-0.1, 1.5, "long"])
def test_a_setting_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match="worker_poll_seconds"):
        from_flat({"worker_poll_seconds": seconds})


class SlowDevice:
    """A worker whose device ends its first step only once the second one was launched."""

    def __init__(self):
        self.launched = [threading.Event(), threading.Event()]

    def execute(self, plan):
        self.launched[plan.step].set()

    def sample(self, masks):
        result = StepResult(step=0, token_ids=np.zeros((0, 1), np.int32), num_tokens=np.zeros(0, np.int32))
        second = self.launched[1]

        def results():
            if not second.wait(60):
                raise TimeoutError("the worker waits for its first step and does not launch the second")
            return [result]

        return SimpleNamespace(results=results, ready=second.is_set)


@pytest.mark.parametrize("by_broadcast", [True, False])
def test_a_step_that_is_sent_while_the_device_is_busy_is_launched_at_once(by_broadcast):
    ours, theirs = socket.socketpair()
    engine_side, worker_side = Channel(ours, FromWorker), Channel(theirs, ToWorker)
    writer = BroadcastWriter(RingShape(1))
    worker = SlowDevice()
    serving = threading.Thread(target=_serve, args=[_WorkerLoop(worker, worker_side), worker_side])
    serving.start()
    try:
        if by_broadcast:
            engine_side.send(Attach(writer.shape, 0))
            engine_side.send_descriptors(writer.descriptors(0))
            assert isinstance(engine_side.receive(), Value)
        for step in range(2):
            for message in (Execute.of(empty_plan(step)), Sample()):
                if by_broadcast:
                    writer.write(message, [engine_side], check=lambda reader: None, timeout=30)
                else:
                    engine_side.send(message)
            assert worker.launched[step].wait(60)
            time.sleep(0.05)  # the worker looks for what to do next
        assert [type(engine_side.receive()) for _ in range(2)] == [Sampled, Sampled]
    finally:
        engine_side.close()
        serving.join()
        worker_side.close()
        writer.close()


def test_a_worker_that_dies_in_a_call_is_named(folder):
    with engine(folder, 2) as made:
        os.kill(made.executor.team[1]._process.pid, signal.SIGKILL)
        with pytest.raises(DeadWorkerError, match="worker 1 of 2: the worker process died with exit status -9"):
            made.executor.call("describe")
        assert made.executor.is_broken


@pytest.mark.matrix
def test_a_worker_that_takes_nothing_is_named(folder, monkeypatch):
    monkeypatch.setattr(worker_team, "RingShape", partial(RingShape, num_chunks=2))
    with engine(folder, 2) as made:
        monkeypatch.setattr(worker_team, "LATE_SECONDS", 1.0)

        def execute_ten():
            for step in range(10):
                made.executor.execute(empty_plan(step))

        os.kill(made.executor.team[1]._process.pid, signal.SIGSTOP)
        with pytest.raises(DeadWorkerError, match=r"workers hang: readers \[1\] of 2 have not finished message"):
            execute_ten()
        assert made.executor.is_broken
