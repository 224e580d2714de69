"""An engine whose workers are on two machines, here two addresses of this one that share no folder."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from frame import AsyncLLM, SamplingParams
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.executor import DeadWorkerError
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import executor_provider
from frame.core.worker import worker_team
from frame.interfaces import Nodes
from frame.links import greeting
from frame.links.greeting import Listener, RefusedError, connect, receive_json, send_json
from frame.links.step_messages import Execute
from frame.links.versions import differences, versions
from frame.offline.in_process import make_engine
from frame.plugins.executors import nodes
from frame.plugins.executors.nodes import described
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, request, running
from tests.free_ports import free_ports

NAMES = ("node 1", "node 0", "nodes")
SETTINGS = {**SMALL, "num_threads": 1, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same checkpoint on two machines, at different paths."""
    return [make_checkpoint(tmp_path_factory.mktemp(f"node{node}"), "llama") for node in range(2)]


@pytest.fixture
def port():
    return free_ports()


def of_nodes(port, **options):
    return {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": port, "plugin": {"nodes": options}}


def flags(values):
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@contextlib.contextmanager
def node(folder, port, *more, **changes):
    """The second machine, as its user starts it."""
    values = {**SETTINGS, **changes, "nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": port}
    command = [sys.executable, "-m", "frame", "serve", str(folder), *flags(values)]
    command += ["--plugin.nodes.address", "127.0.0.2", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def step_for(engine, seconds):
    latest = time.monotonic() + seconds
    while time.monotonic() < latest:
        engine.step()


def engine(folder, port, **changes):
    options = {"wait_seconds": 60.0, **changes.pop("options", {})}
    return from_flat({**SETTINGS, "model": str(folder), **of_nodes(port, **options), **changes})


def test_two_machines_give_the_tokens_of_one(folders, port):
    with running(from_flat({**SETTINGS, "model": str(folders[0]), "tensor_parallel_size": 1}), Registry.load()) as one:
        expected = greedy(one, prompts(400))
    with node(folders[1], port) as other:
        with running(engine(folders[0], port), Registry.load()) as both:
            assert greedy(both, prompts(400)) == expected
        assert other.wait(timeout=60) == 0, "the engine said that it was the last"


@pytest.mark.matrix
def test_a_worker_that_dies_elsewhere_ends_the_engine_and_its_node_serves_the_next(folders, port):
    with node(folders[1], port) as other:
        first = make_engine(engine(folders[0], port), Registry.load())
        first.add(request("a", prompts(400)[0], 60))
        first.step()
        children = subprocess.run(["pgrep", "-P", str(other.pid)], capture_output=True, text=True, check=True)
        subprocess.run(["kill", "-9", *children.stdout.split()], check=True)
        with pytest.raises(DeadWorkerError, match=r"worker 1 of 2: its process on node 1 \(127.0.0.2\) has ended"):
            step_for(first, 30)
        first.close()
        with running(engine(folders[0], port), Registry.load()) as second:
            assert greedy(second, prompts(400)[:1])


@pytest.mark.matrix
def test_a_worker_that_cannot_start_elsewhere_is_named_with_its_node_and_the_cause(folders, port, tmp_path):
    broken = shutil.copytree(folders[1], tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with node(broken, port):
        with pytest.raises(RuntimeError, match=r"^worker 1 of 2: on node 1 \(127\.0\.0\.2\): .*model\.safetensors"):
            make_engine(engine(folders[0], port), Registry.load())
        with socket.create_server(("127.0.0.1", port)):
            """The port is free again."""


@pytest.mark.matrix
def test_a_worker_that_hangs_elsewhere_is_named(folders, port):
    with node(folders[1], port) as other:
        options = {"plugin": {"nodes": {"wait_seconds": 60.0, "step_timeout_seconds": 4.0}}}
        found = make_engine(engine(folders[0], port, **options), Registry.load())
        found.add(request("a", prompts(400)[0], 60))
        found.step()
        children = subprocess.run(["pgrep", "-P", str(other.pid)], capture_output=True, text=True, check=True)
        subprocess.run(["kill", "-STOP", *children.stdout.split()], check=True)
        with pytest.raises(
            DeadWorkerError, match="so that they wait for worker 1 of 2 elsewhere, or a device or the net"
        ):
            step_for(found, 30)
        found.close()


@pytest.mark.matrix
def test_streams_go_on_with_the_same_text_when_a_worker_elsewhere_is_killed(folders, port):
    async def stream(llm, name, seen):
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
        async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id=name):
            ids = list(output.outputs[0].token_ids)
            if len(ids) >= 5:
                seen.set()
        return ids

    async def run(other):
        config = engine(folders[0], port, deterministic=True, skip_tokenizer_init=True)
        llm = await asyncio.to_thread(AsyncLLM.from_config, config)
        try:
            expected, seen = await stream(llm, "alone", asyncio.Event()), asyncio.Event()
            streams = [asyncio.create_task(stream(llm, name, seen)) for name in ("a", "b")]
            await seen.wait()
            children = subprocess.run(["pgrep", "-P", str(other.pid)], capture_output=True, text=True, check=True)
            subprocess.run(["kill", "-9", *children.stdout.split()], check=True)
            assert await asyncio.wait_for(asyncio.gather(*streams), 100) == [expected, expected]
        finally:
            llm.shutdown()

    with node(folders[1], port, "--deterministic", "--skip-tokenizer-init") as other:
        asyncio.run(run(other))


@pytest.mark.matrix
def test_a_node_with_other_versions_is_named_on_both(folders, port, monkeypatch, caplog):
    monkeypatch.setattr(nodes, "versions", lambda: {**versions(), "torch": "1.0"})
    with node(folders[1], port) as other:
        with pytest.raises(ValueError, match="node 1 of 2 did not come to"):
            make_engine(engine(folders[0], port, options={"wait_seconds": 20.0}), Registry.load())
        assert other.wait(timeout=60) == 1
        said = f"node 1 has torch {versions()['torch']}, node 0 1.0; all nodes need the same"
        assert f"node 0 refuses this node: {said}" in other.stderr.read()
    assert f"a node at 127.0.0.2 is refused: {said}" in caplog.text


@pytest.mark.matrix
def test_a_node_that_differs_is_told_so_and_the_engine_waits_on(folders, port):
    errors = []

    def start():
        try:
            make_engine(engine(folders[0], port, options={"wait_seconds": 15.0}), Registry.load()).close()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    with node(folders[1], port, block_size=32) as other:
        said = other.stderr.read()
        assert other.wait(timeout=60) == 1
    assert "node 0 refuses this node: node 1 was given cache.block_size 32, node 0 " in said
    thread.join()
    assert "node 1 of 2 did not come to 127.0.0.1:" in str(errors[0])


def test_a_port_in_use_is_named(folders):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen at 127.0.0.1:{port} for the other machines: ") as raised:
            make_engine(engine(folders[0], port), Registry.load())
    assert str(raised.value).endswith(
        "Address already in use; choose another --master-port or --master-addr, on all nodes"
    )


@pytest.mark.matrix
def test_a_node_without_an_engine_gives_up(folders, port):
    with node(folders[1], port, "--plugin.nodes.wait-seconds", "1") as other:
        said = other.stderr.read()
        assert other.wait(timeout=60) == 1
    assert f"node 0 at 127.0.0.1:{port} was not there for 1 seconds: Connection refused" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2, "master_addr": "a"},
            "node_rank 2 is not below nnodes 2",
        ),
        ({"nnodes": 2, "tensor_parallel_size": 2}, "nnodes 2 needs master_addr"),
        (
            {"nnodes": 2, "tensor_parallel_size": 3, "master_addr": "a"},
            "3 workers .* cannot be spread evenly over nnodes 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(values, said):
    with pytest.raises(ConfigError, match=said):
        from_flat({"model": "", "nnodes": 2, **values})


def test_versions_that_differ_are_named():
    here, there = described(Nodes(count=2)), described(Nodes(count=2, rank=1))
    assert not differences(here, there, *NAMES)
    there["versions"] = {**there["versions"], "torch": "1.0"}
    assert differences(here, there, *NAMES).startswith("node 1 has torch 1.0, node 0 2.")
    assert differences(here, {}, *NAMES) == "node 1 does not say its versions"


@pytest.mark.parametrize("executor", ["process", "inline"])
def test_executors_of_one_machine_refuse_several(folders, port, executor):
    with pytest.raises(PluginError, match="it runs no workers on other nodes, and nnodes is 2"):
        make_engine(engine(folders[0], port, executor=executor), Registry.load())


@pytest.mark.parametrize("executor", ["nodes", "ray"])
def test_engines_that_share_experts_are_refused_where_their_workers_would_not_meet(folders, port, executor):
    if executor == "ray":
        pytest.importorskip("ray")
    nodes = of_nodes(port) if executor == "nodes" else {}
    experts = {"data_parallel_size": 2, "data_parallel_rank": 1, "enable_expert_parallel": True}
    config = from_flat({**SETTINGS, "model": str(folders[0]), **nodes, **experts, "executor": executor})
    with pytest.raises(PluginError, match="workers meet those of their own engine alone, and 2 engines share experts"):
        executor_provider(config, Registry.load())


@pytest.mark.matrix
def test_nobody_may_join_a_running_engine(folders, port):
    with node(folders[1], port), running(engine(folders[0], port), Registry.load()) as both:
        with pytest.raises(ConnectionRefusedError):
            connect("127.0.0.1", port, b"", {"node": 1})
        assert greedy(both, prompts(400)[:1])


@pytest.mark.matrix
def test_a_step_is_encoded_once_for_all_machines(folders, port, monkeypatch):
    encoded = []
    pack = worker_team.pack
    monkeypatch.setattr(worker_team, "pack", lambda message: encoded.append(type(message)) or pack(message))
    with node(folders[1], port), running(engine(folders[0], port), Registry.load()) as both:
        encoded.clear()
        steps = both.scheduler._num_steps
        assert greedy(both, prompts(400)[:1])
        assert encoded.count(Execute) == both.scheduler._num_steps - steps


def test_a_stranger_who_trickles_bytes_is_given_up(monkeypatch):
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 0.5)
    listener = Listener("127.0.0.1", 0, b"secret")
    try:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() < began + 60:
                    stranger.sendall(b"x")
                    time.sleep(0.05)
            assert time.monotonic() - began < 30
    finally:
        listener.close()


def test_only_who_knows_the_key_is_let_in():
    listener = Listener("127.0.0.1", 0, b"secret")
    try:
        with pytest.raises(RefusedError, match="has another key, or is no engine of frame"):
            connect("127.0.0.1", listener.port, b"", {"node": 1})
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(200))
            assert len(stranger.recv(100)) == 32
            assert listener.next(0.3) is None
        with connect("127.0.0.1", listener.port, b"secret", {"node": 1}) as ours:
            theirs, said = listener.next(60)
            with theirs:
                assert said == {"node": 1}
                send_json(theirs, {"ranks": [3]})
                assert receive_json(ours) == {"ranks": [3]}
    finally:
        listener.close()
