"""The engine gives the same tokens whichever executor runs its worker, and leaves no process behind."""

import os
import select
import signal
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.config.tree import FrameConfig
from frame.core.engine.engine import Engine
from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.logits import LogitsProcessor
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.step import StepResult
from frame.core.plugin_host.registry import Registry
from frame.core.processes.channel import Channel
from frame.core.worker.channel_worker import FromWorker, ToWorker
from frame.core.worker.factory import Workers
from frame.core.worker.worker_process import _WorkerLoop
from frame.interfaces import Placement
from frame.offline.in_process import make_engine
from frame.testing.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama")
    return str(path)


def start(folder: str, executor: str, **settings) -> Engine:
    values = {"model": folder, "dtype": "float32", "executor": executor, "num_threads": 1, **settings}
    return make_engine(from_flat(values), Registry.load())


def add(engine: Engine, count: int = 3, **params) -> None:
    draw = np.random.default_rng(0)
    for index in range(count):
        ids = draw.integers(5, engine.info.vocab_size, size=4 + 11 * index).astype(np.int32)
        values = {"temperature": 0.7, "max_tokens": 12, "ignore_eos": True, **params}
        engine.add(
            EngineRequest(
                request_id=str(index),
                prompt_ids=ids,
                params=SamplingParams(**values),
                max_tokens=values["max_tokens"],
                seed=index,
            )
        )


def drain(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.fixture(scope="module")
def expected(folder):
    engine = start(folder, "inline")
    add(engine, logprobs=2)
    tokens = drain(engine)
    engine.close()
    return tokens


def test_synchronous_equals_asynchronous(folder, expected):
    engine = start(folder, "inline", async_scheduling=False)
    add(engine)
    assert drain(engine) == expected
    engine.close()


@pytest.fixture(scope="module")
def remote(folder):
    engine = start(folder, "process")
    yield engine
    process = engine.executor.team[0]._process
    engine.close()
    engine.close()
    assert process.poll() == 0


def test_a_worker_process_gives_the_same_tokens(remote, expected):
    os.kill(remote.executor.team[0]._process.pid, signal.SIGINT)  # ctrl-C reaches all processes of a terminal
    add(remote, logprobs=2)
    assert drain(remote) == expected
    (facts,) = remote.executor.call("describe")
    assert facts["platform"] == "cpu"


def test_worker_methods_are_called_by_name_only(remote):
    engine = remote
    with pytest.raises(RuntimeError, match=r"no worker method 'fly'; there are: .*describe"):
        engine.call("worker", {"method": "fly"})
    with pytest.raises(ValueError, match="run: function is a callable, which cannot travel"):
        engine.call("worker", {"method": "run", "function": print})
    engine.call("sleep", {"keep": []})
    with pytest.raises(RuntimeError, match="the engine sleeps already"):
        engine.call("sleep")
    engine.call("wake_up")
    assert engine.call("is_sleeping") is False


def test_a_call_that_takes_too_long_ends_and_its_answer_is_nobodys(remote, expected):
    pid = remote.executor.team[0]._process.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"a worker did not answer describe within 0\.2 seconds; it goes on with it"):
        remote.call("worker", {"method": "describe"}, timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(RuntimeError, match="no worker method 'fly'"):
        remote.call("worker", {"method": "fly"}, timeout=60)
    add(remote, logprobs=2)
    assert drain(remote) == expected


class Local(LogitsProcessor):
    """Defined where no other process finds it."""


def test_what_cannot_reach_a_worker_process_is_said_before_it_starts():
    Local.__module__ = "__main__"
    with pytest.raises(
        ConfigError, match=r"^the configuration cannot be given to another process: logits processor __main"
    ):
        Workers(FrameConfig(model={"logits_processors": [Local]}), Registry([], []), print).recipe(Placement())


def test_a_killed_worker_is_told_with_its_status(folder):
    engine = start(folder, "process")
    add(engine, max_tokens=200)
    engine.step()
    os.kill(engine.executor.team[0]._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the worker process died with exit status -9"):
        drain(engine)
    engine.close()


def test_a_failing_start_carries_the_cause(tmp_path):
    make_checkpoint(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for executor in ("inline", "process"):
        with pytest.raises((ValueError, RuntimeError), match=r"model\.safetensors"):
            start(str(tmp_path), executor)


@pytest.mark.matrix
def test_a_long_prompt_and_a_large_answer_pass_each_other(folder):
    """Neither fits in a socket's buffer, so each side must read what the other sends while it sends."""
    lengths = {"hf_overrides": {"max_position_embeddings": 8192}, "num_gpu_blocks_override": 1200}
    chunks = {"max_num_batched_tokens": 256, "long_prefill_token_threshold": 128, "max_num_partial_prefills": 2}
    engine = start(folder, "process", max_logprobs=-1, **lengths, **chunks, max_long_partial_prefills=2)
    connection = engine.executor.team[0].channel._socket
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ids = np.full(6000, 7, np.int32)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    engine.add(EngineRequest(request_id="scored", prompt_ids=ids[:600], params=scored, max_tokens=1, seed=0))
    engine.step()
    select.select([connection], [], [], 30)  # the answer of the second step is on its way
    plain = SamplingParams(temperature=0, max_tokens=1)
    engine.add(EngineRequest(request_id="long", prompt_ids=ids, params=plain, max_tokens=1, seed=0))
    stepping = threading.Thread(target=drain, args=[engine], daemon=True)
    stepping.start()
    stepping.join(150)  # a few seconds on an idle machine
    stuck = stepping.is_alive()
    if stuck:
        engine.executor.team[0]._process.kill()
    engine.close()
    assert not stuck


def test_a_result_that_is_too_large_to_be_sent_fails_its_step_alone():
    ours, theirs = socket.socketpair()
    engine_side, worker_side = Channel(ours, FromWorker), Channel(theirs, ToWorker, limit=1000)
    result = StepResult(step=3, token_ids=np.zeros((1000, 1), np.int32), num_tokens=np.ones(1000, np.int32))
    loop = _WorkerLoop(None, worker_side)
    loop.unanswered.append((3, SimpleNamespace(results=lambda: [result])))
    loop.answer_oldest()
    answer = engine_side.receive()
    assert answer.step == 3
    assert "exceeds the channel's limit of 1000" in answer.message
    engine_side.close()
    worker_side.close()
