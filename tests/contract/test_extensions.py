"""Methods of a worker extension are called on all workers, in this process and in others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from frame import LLM, AsyncEngineArgs, AsyncLLM
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import HERE, Offer, PluginError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import API_VERSION, Provider, WorkerExtension
from frame.offline.in_process import make_engine
from frame.testing import WorkerExtensionSuite
from frame.testing.checkpoints import make_checkpoint

CALLS = '{"largest": {"prefix": "norm"}, "fill": {"name": "model.norm.weight", "shape": [64], "value": 1.0}}'


class TestWeightTools(WorkerExtensionSuite):
    target = "tests.contract.extensions:WeightTools"
    tags = {"calls": CALLS}  # noqa: RUF012


class Sleeper(WorkerExtension):
    """Takes a name that workers have."""

    def sleep(self) -> None:
        return None


class Failing(WorkerExtension):
    """Can be closed, and fails when it is called."""

    closed = 0

    def fail(self) -> None:
        raise RuntimeError("as it was told")

    def close(self) -> None:
        type(self).closed += 1


def with_extensions(registry: Registry) -> Registry:
    for name, target in (
        ("weight-tools", "tests.contract.extensions:WeightTools"),
        *((one.__name__, f"{__name__}:{one.__name__}") for one in (Sleeper, Failing)),
    ):
        registry.offers.append(Offer("extension", Provider(name, target, api=f"=={API_VERSION}"), HERE, ""))
    return registry


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package offered them."""
    load = Registry.load
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)  # for other processes
    monkeypatch.setattr(Registry, "load", lambda only=None: with_extensions(load(only)))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(make_checkpoint(tmp_path, "llama"))


def test_llm_calls_it_on_a_worker_of_this_process(folder):
    # --8<-- [start:offline]
    llm = LLM(folder, worker_extension="weight-tools")
    shape = {"name": "model.norm.weight", "shape": [64]}
    llm.collective_rpc("fill", kwargs={**shape, "value": 3.5})
    assert llm.collective_rpc("largest", kwargs={"prefix": "norm"}) == [3.5]
    # --8<-- [end:offline]
    assert llm.collective_rpc("largest", args=("norm",)) == [3.5]
    with pytest.raises(ValueError, match=r"no worker method 'fly'; there are: .*, fill, largest, .*sleep"):
        llm.collective_rpc("fly")
    with pytest.raises(ValueError, match="no worker method 'fly'; there are: "):
        llm.collective_rpc("fly", args=(1,))
    llm.close()


def test_worker_processes_answer_by_rank(folder):
    config = from_flat(
        {"model": folder, "worker_extension": "weight-tools", "tensor_parallel_size": 2, "num_threads": 1}
    )
    engine = make_engine(config, Registry.load())
    try:
        assert engine.call(
            "worker", {"method": "fill", "name": "lm_head.weight", "shape": [512, 64], "value": 7.0}
        ) == [None, None]
        assert engine.call("worker", {"method": "largest", "prefix": "head"}) == [7.0, 7.0]
    finally:
        engine.close()


def test_async_llm_calls_it_in_its_engine_process(folder):
    async def largest() -> list[float]:
        settings = {"worker_extension": "weight-tools", "num_threads": 1, "skip_tokenizer_init": True}
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(model=folder, **settings))
        try:
            await llm.collective_rpc("fill", kwargs={"name": "model.norm.weight", "shape": [64], "value": 2.5})
            return await llm.collective_rpc("largest", kwargs={"prefix": "norm"})
        finally:
            llm.shutdown()

    assert asyncio.run(largest()) == [2.5]


def test_what_it_raises_reaches_the_caller_and_it_is_closed_with_the_worker(folder):
    engine = make_engine(from_flat({"model": folder, "worker_extension": "Failing"}), Registry.load())
    before = Failing.closed
    with pytest.raises(RuntimeError, match="as it was told"):
        engine.call("worker", {"method": "fail"})
    engine.close()
    engine.close()
    assert Failing.closed == before + 1


def test_names_that_workers_have_are_refused_at_the_start(folder):
    with pytest.raises(ValueError, match="worker extension 'Sleeper' has sleep, which workers have: rename it there"):
        make_engine(from_flat({"model": folder, "worker_extension": "Sleeper"}), Registry.load())


def test_a_name_that_nobody_offers(folder):
    with pytest.raises(PluginError, match="no worker extension 'tools'; "):
        Registry.load().check(from_flat({"model": folder, "worker_extension": "tools"}))


def test_the_name_that_vllm_has_for_it():
    assert from_flat({"worker_extension_cls": "weight-tools"}).executor.worker_extension == "weight-tools"
    assert from_flat({"worker_extension_cls": ""}).executor.worker_extension is None
    with pytest.raises(
        ConfigError, match=r"worker_extension_cls='my\.module\.Tools' cannot be .* hook frame_worker_ex"
    ):
        from_flat({"worker_extension_cls": "my.module.Tools"})
