"""How an engine is divided is said in one line, and refused before anything is loaded where devices are too few."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.executor import Executor
from frame.core.plugin_host.offers import HERE, Offer
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.interfaces import API_VERSION, Provider
from frame.layout.devices import check_devices
from frame.layout.line import layout_line
from frame.offline.in_process import make_engine
from frame.plugins.executors.process import ProcessExecutor
from frame.plugins.platforms import cpu
from frame.testing.checkpoints import make_checkpoint
from frame.testing.thread_executor import with_threads


class FourDevices(cpu.CpuPlatform):
    """A CPU that is to have four devices."""

    @classmethod
    def num_devices(cls) -> int:
        return 4


class Elsewhere(ProcessExecutor):
    """Finds devices on other machines."""

    takes_local_devices = False


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    return make_checkpoint(tmp_path, "llama", **sizes)


def registry() -> Registry:
    found = Registry.load()
    target = f"{__name__}:FourDevices"
    found.offers.append(Offer("platform", Provider("four", target, api=f"=={API_VERSION}"), HERE, ""))
    return found


def devices(folder: Path, executor: type[Executor] = ProcessExecutor, **settings) -> range | None:
    config = from_flat({"model": str(folder), "platform": "four", **settings})
    return check_devices(config, mesh_of(config), read_checkpoint(config), registry(), executor)


def line(folder: Path, taken: range | None = None, **settings) -> str:
    config = from_flat({"model": str(folder), **settings})
    return layout_line(config, mesh_of(config), read_checkpoint(config), Registry.load(), taken)


def refused(folder: Path, **settings) -> str:
    with pytest.raises(ConfigError) as raised:
        devices(folder, **settings)
    return str(raised.value)


def test_workers_take_devices_in_order(llama):
    assert devices(llama) == range(1)
    assert devices(llama, tensor_parallel_size=2, pipeline_parallel_size=2) == range(4)
    second = {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_rank_local": 1}
    assert devices(llama, tensor_parallel_size=2, **second) == range(2, 4)
    nodes = {"nnodes": 2, "master_addr": "127.0.0.1"}
    assert devices(llama, tensor_parallel_size=8, **nodes) == range(4)
    assert devices(llama, Elsewhere, tensor_parallel_size=8) is None
    assert devices(llama, tensor_parallel_size=8, platform="cpu") is None


def test_more_ranks_than_devices(llama):
    assert refused(llama, tensor_parallel_size=8) == (
        "tensor_parallel_size 8 and pipeline_parallel_size 1 need 8 devices, and this machine has 4 (cpu); sizes that "
        "work: 4 × 1 (tensor × pipeline)"
    )
    assert refused(llama, tensor_parallel_size=2, pipeline_parallel_size=3, pipeline_layers=[2, 2, 2]).endswith(
        "need 6 devices, and this machine has 4 (cpu); sizes that work: 4 × 1, 2 × 2, 1 × 4 (tensor × pipeline)"
    )
    nodes = {"nnodes": 2, "master_addr": "127.0.0.1"}
    assert refused(llama, tensor_parallel_size=2, pipeline_parallel_size=6, **nodes).endswith(
        "need 6 devices on each of 2 nodes, and this machine has 4 (cpu); sizes that work: 8 × 1, 4 × 2, 2 × 4 "
        "(tensor × pipeline)"
    )


def test_sizes_that_the_model_refuses_are_not_named(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=96)
    assert refused(folder, tensor_parallel_size=6).endswith("sizes that work: 3 × 1 (tensor × pipeline)")


def test_more_engines_than_devices(llama):
    third = {"data_parallel_size": 3, "data_parallel_rank": 2, "data_parallel_rank_local": 2}
    assert refused(llama, tensor_parallel_size=2, **third) == (
        "3 engines of 2 devices need 6, and this machine has 4 (cpu); data_parallel_size_local can be 2 at most here"
    )


def test_the_line_says_what_each_rank_has(llama):
    assert line(llama) == line(llama, range(1)) == ""
    assert line(llama, range(4), tensor_parallel_size=2, pipeline_parallel_size=2) == (
        "2 tensor × 2 pipeline ranks on devices 0–3; 8 heads → 4, KV heads 4 → 2 per rank; layers 3 + 3"
    )
    assert line(llama, tensor_parallel_size=8, decode_context_parallel_size=2) == (
        "8 tensor ranks; 8 heads → 1, KV heads 4 → 1 per rank, each on 2 ranks; 2 ranks share the KV cache of a request"
    )
    assert line(llama, range(2), pipeline_parallel_size=4, nnodes=2, master_addr="127.0.0.1") == (
        "4 pipeline ranks on devices 0–1 of each of 2 nodes; layers 1 + 2 + 2 + 1"
    )
    assert line(llama, range(1, 2), data_parallel_size=2, data_parallel_rank=1) == "engine 1 of 2 on device 1"
    assert line(llama, data_parallel_size=2, data_parallel_rank=1) == "engine 1 of 2"


def test_the_line_counts_experts(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    whole = line(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    assert whole.endswith("per rank; 8 experts → 4 per rank")
    engines = {"data_parallel_size": 2, "data_parallel_rank": 1, "enable_expert_parallel": True}
    assert line(folder, range(1, 2), **engines) == "engine 1 of 2 on device 1; 8 experts → 4 per rank"
    assert line(folder, tensor_parallel_size=2).endswith("per rank; 2 parts of each of 8 experts")


def test_an_engine_says_it_and_one_of_one_rank_does_not(llama, caplog):
    for size, expected in ((1, 0), (2, 1)):
        caplog.clear()
        values = {"model": str(llama), "tensor_parallel_size": size, "executor": "threads", "num_threads": 1}
        with caplog.at_level(logging.INFO, "frame"):
            make_engine(from_flat(values), with_threads(Registry.load())).close()
        assert len([text for text in caplog.messages if text.startswith("layout: ")]) == expected


@pytest.mark.parametrize("sized", [False, True], ids=["weights", "cache"])
def test_memory_that_is_taken_is_refused_before_weights_are_read(sized, llama, monkeypatch):
    monkeypatch.setattr(cpu, "available_bytes", lambda: 20 << 10)
    monkeypatch.setattr("frame.core.worker.start.model_loading.load_weights", None)  # is not called
    settings = {"kv_cache_memory_bytes": 3 << 20} if sized else {}
    with pytest.raises(ValueError, match=r"0 MiB of this machine's memory are available, and this worker needs .* MiB"):
        make_engine(from_flat({"model": str(llama), **settings}), Registry.load())


def test_memory_that_is_taken_names_the_rank(llama, monkeypatch):
    monkeypatch.setattr(cpu, "available_bytes", lambda: 20 << 10)
    values = {"model": str(llama), "tensor_parallel_size": 2, "executor": "threads", "num_threads": 1}
    with pytest.raises(ValueError, match=r"^worker [01] of 2: 0 MiB of this machine's memory are available, and this"):
        make_engine(from_flat(values), with_threads(Registry.load()))
