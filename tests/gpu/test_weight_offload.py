"""Weights in host memory on a GPU: tokens equal to those of weights on the device, eager and from CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.plugin_host.registry import Registry
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import greedy, prompts, running

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GIVEN = prompts(512, (3, 17, 40, 1, 9, 22, 64))
OFFLOADED = {"cpu_offload_gb": 1}


@contextmanager
def started(folder: Path, **settings: Any) -> Iterator[Engine]:
    given = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, "dtype": "float32"}
    given["enable_prefix_caching"] = False  # bfloat16 rounds a prompt of which a part is cached otherwise
    with running(from_flat({"model": str(folder), **given, **settings}), Registry.load()) as engine:
        yield engine


def asked(engine: Engine, look: Any) -> Any:
    return engine.executor.call("run", {"function": look})[0]


def captured(engine: Engine) -> int:
    """Has the engine capture all that it wants; how many decode sizes have a graph."""
    for _ in range(200):
        if not engine.has_idle_work():
            break
        engine.step()
    return asked(engine, lambda worker: len(getattr(worker.runner.device.graphs, "_captured", ())))


def check(folder: Path, **settings: Any) -> None:
    """Greedy tokens are those of weights on the device, from graphs of all sizes and eagerly."""
    for eager in (False, True):
        given = {**settings, "enforce_eager": eager, "plugin": {"cuda": {"capture_prompts": False}}}
        with started(folder, **given) as engine:
            captured(engine)
            wanted = greedy(engine, GIVEN)
        with started(folder, **given, **OFFLOADED) as engine:
            assert asked(engine, lambda worker: len(worker.model.weight_ring._layers)) == 6
            assert (captured(engine) > 1) != eager
            for _ in range(3):
                assert greedy(engine, GIVEN) == wanted


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"cpu_offload_ahead": 1}),
        ("qwen3-moe", {}),
        ("deepseek-v3", {}),
        ("llama", {"quantization": "int8", "dtype": "bfloat16"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"deterministic": True}),
    ],
    ids=str,
)
def test_tokens_are_those_of_weights_on_the_device(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=6)
    check(tmp_path, **settings)


def test_the_device_holds_what_is_not_kept_and_the_ring(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    make_checkpoint(tmp_path, "llama", num_hidden_layers=12, head_dim=64, **sizes)

    def held(**settings: Any) -> tuple[int, int]:
        with started(tmp_path, enforce_eager=True, **settings) as engine:
            greedy(engine, GIVEN[:1])
            ring = asked(engine, lambda worker: getattr(worker.model, "weight_ring", None) is not None)
            saved = asked(engine, lambda worker: _saved(worker.model)) if ring else 0
            return torch.cuda.memory_allocated(), saved

    (plain, _), (less, saved) = held(), held(cpu_offload_gb=1, cpu_offload_ahead=1)
    assert saved > 100 << 20
    assert abs(plain - less - saved) < 32 << 20


def _saved(model: Any) -> int:
    return sum(one.num_bytes for one in model.weight_ring._layers) - model.weight_ring.num_bytes


def test_other_weights_are_read_by_graphs_that_were_captured_before(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / str(seed), "llama", num_hidden_layers=6, seed=seed) for seed in (0, 1)]
    with started(folders[1]) as engine:
        wanted = greedy(engine, GIVEN)
    with started(folders[0], **OFFLOADED) as engine:
        assert greedy(engine, GIVEN) != wanted
        assert captured(engine) > 1
        engine.call("update_weights", {"model": str(folders[1])})
        for _ in range(2):
            assert greedy(engine, GIVEN) == wanted
