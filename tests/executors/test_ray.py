"""An engine in a real Ray cluster of two nodes of this machine, one worker on each."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from frame import AsyncLLM, EngineArgs, SamplingParams
from frame.core.config.flat import from_flat
from frame.core.interfaces.executor import DeadWorkerError
from frame.core.plugin_host.registry import Registry
from frame.links import greeting
from frame.offline.in_process import make_engine
from frame.plugins.executors import ray as ray_executor
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, request, running

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Cluster()
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 << 20, include_dashboard=False)
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ray"), "llama")


def config(folder, **changes):
    values = {**SMALL, "model": str(folder), "num_threads": 1, "executor": "ray", "tensor_parallel_size": 2}
    return from_flat({**values, **changes})


def is_free():
    return ray.available_resources().get("CPU", 0) == 2


def wait_for(condition, seconds=60):
    latest = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.1)


class Unreachable(greeting.Listener):
    """Says that it listens where nobody does."""

    def __init__(self, host, port, key):
        super().__init__(host, port, key)
        self.port = 1


def children(parent, words):
    """The processes that `parent` started whose command has `words`."""
    found = subprocess.run(["pgrep", "-P", str(parent), "-f", words], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def workers(cluster):
    """The processes of frame's workers that actors on the cluster's nodes have started."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    actors = [actor for raylet in raylets for actor in children(raylet, "ray::RayWorker")]
    return [worker for actor in actors for worker in children(actor, "frame worker")]


def step_for(engine, seconds):
    latest = time.monotonic() + seconds
    while time.monotonic() < latest:
        engine.step()


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_workers_on_two_nodes_give_the_tokens_of_one(cluster, folder, axis):
    with running(config(folder, executor="inline", tensor_parallel_size=1), Registry.load()) as one:
        expected = greedy(one, prompts(400))
    sizes = {"tensor_parallel_size": 1, f"{axis}_parallel_size": 2}
    with running(config(folder, **sizes), Registry.load()) as both:
        places = [found["address"] for found in both.executor._found]
        tables = [ray.util.placement_group_table(group) for group in both.executor._groups]
        nodes = {node for table in tables for node in table["bundles_to_node_id"].values()}
        assert len(places) == 2
        assert len(nodes) == 2
        assert greedy(both, prompts(400)) == expected
    wait_for(is_free)


def test_a_worker_that_dies_ends_the_engine_and_frees_the_cluster(cluster, folder):
    engine = make_engine(config(folder), Registry.load())
    engine.add(request("a", prompts(400)[0], 100))
    engine.step()
    os.kill(workers(cluster)[1], signal.SIGKILL)
    with pytest.raises(
        DeadWorkerError, match=r"worker [01] of 2: its process on Ray node .*: killed by SIGKILL"
    ) as died:
        step_for(engine, 30)
    assert died.value.killed
    engine.close()
    wait_for(is_free)


def test_an_actor_that_dies_ends_the_engine_and_frees_the_cluster(cluster, folder):
    engine = make_engine(config(folder), Registry.load())
    engine.add(request("a", prompts(400)[0], 100))
    engine.step()
    ray.kill(engine.executor._actors[1])
    with pytest.raises(DeadWorkerError, match=r"worker 1 of 2: its process on Ray node .*: its actor is gone: "):
        step_for(engine, 30)
    engine.close()
    wait_for(is_free)


async def stream(llm, name, seen):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
    ids = []
    async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id=name):
        ids = list(output.outputs[0].token_ids)
        if len(ids) >= 5:
            seen.set()
    return ids


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_streams_go_on_with_the_same_text_in_an_engine_that_takes_the_place(cluster, folder, monkeypatch, victim):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    arguments = {"tensor_parallel_size": 2, "deterministic": True, "num_threads": 1, "dtype": "float32"}

    async def run():
        ending = set(children(os.getpid(), "frame engine"))  # of the case before
        llm = AsyncLLM.from_engine_args(
            EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=128, executor="ray", **arguments)
        )
        try:
            expected = await stream(llm, "alone", asyncio.Event())
            seen, before = asyncio.Event(), workers(cluster)
            streams = [asyncio.create_task(stream(llm, name, seen)) for name in ("a", "b")]
            await seen.wait()
            engines = [one for one in children(os.getpid(), "frame engine") if one not in ending]
            serving = [one for one in engines if Path(f"/proc/{one}/comm").read_text() == "frame-engine\n"]
            victims = before[1:] if victim == "worker" else serving  # another one may stand by
            assert len(victims) == 1
            os.kill(victims[0], signal.SIGKILL)
            assert await asyncio.wait_for(asyncio.gather(*streams), 120) == [expected, expected]
            assert not set(before) & set(workers(cluster))
        finally:
            llm.shutdown()

    asyncio.run(run())
    wait_for(is_free)
    assert not workers(cluster)


def test_a_worker_that_cannot_reach_the_engine_is_named(cluster, folder, monkeypatch):
    monkeypatch.setattr(ray_executor, "Listener", Unreachable)
    with pytest.raises(ValueError, match=r"worker 0 on Ray node .* does not start: .*refused"):
        make_engine(config(folder), Registry.load())
    wait_for(is_free)


def test_a_cluster_that_is_too_small_is_named(cluster, folder):
    said = "the Ray cluster is too small: 4 workers need 4 CPU, and it has 2 on 2 nodes"
    with pytest.raises(ValueError, match=said):
        make_engine(config(folder, tensor_parallel_size=2, pipeline_parallel_size=2), Registry.load())
    assert is_free()


def test_a_cluster_that_others_use_is_named(cluster, folder):
    @ray.remote(num_cpus=1)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    assert ray.get(other.ready.remote())
    with pytest.raises(ValueError, match="did not free 2 times 1 CPU within 1 seconds: others use it; free are 1 CPU"):
        make_engine(config(folder, plugin={"ray": {"wait_seconds": 1}}), Registry.load())
    ray.kill(other)
    wait_for(is_free)


def test_versions_that_differ_are_named(cluster, folder, monkeypatch):
    monkeypatch.setattr(ray_executor, "versions", lambda: {"torch": "1.0"})
    said = r"Ray node .*, which has worker 0, has torch 2\..*, and the engine's machine has 1.0"
    with pytest.raises(ValueError, match=said):
        make_engine(config(folder), Registry.load())
    wait_for(is_free)


def test_ray_data_answers_the_rows_of_a_dataset(cluster, tmp_path):
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    example = Path(__file__).parents[2] / "examples/ray_data.py"
    ran = subprocess.run(
        [sys.executable, str(example), str(tmp_path), "one", "two", "three"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    answers = [line for line in ran.stdout.splitlines() if " … " in line]
    assert sorted(line.split()[0] for line in answers) == ["one", "three", "two"]
