"""The engine gives the same tokens whichever executor runs its worker, and leaves no process behind."""

import os
import signal

import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine, make_engine
from frame.core.interfaces.engine import EngineRequest
from frame.core.interfaces.sampling import SamplingParams
from frame.core.registry import Registry
from frame.core.testing.checkpoints import make_checkpoint


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


def test_a_worker_process_gives_the_same_tokens_and_ends(folder, expected):
    engine = start(folder, "process")
    add(engine, logprobs=2)
    assert drain(engine) == expected
    (facts,) = engine.executor.call("describe")
    assert facts["platform"] == "cpu"
    process = engine.executor._worker._process
    engine.close()
    engine.close()
    assert process.poll() == 0


def test_worker_methods_are_called_by_name_only(folder):
    engine = start(folder, "process")
    with pytest.raises(RuntimeError, match=r"no worker method 'fly'; there are: .*describe"):
        engine.call("worker", {"method": "fly"})
    with pytest.raises(ValueError, match="run: function is a callable, which cannot travel"):
        engine.call("worker", {"method": "run", "function": print})
    with pytest.raises(RuntimeError, match="sleep is not available on this platform"):
        engine.call("sleep")
    engine.close()


def test_a_killed_worker_is_told_with_its_status(folder):
    engine = start(folder, "process")
    add(engine, max_tokens=200)
    engine.step()
    os.kill(engine.executor._worker._process.pid, signal.SIGKILL)
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
