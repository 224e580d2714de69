"""Captured steps on a GPU: when they are made, what time and memory that takes, and that tokens stay equal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.engine.engine import Engine
from frame.core.plugin_host.registry import Registry
from frame.plugins.platforms.cuda.graphs.piecewise_capture import PieceCapturer
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import greedy, prompts, running
from tests.models.test_text_parts import made

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GIVEN = prompts(512, (3, 17, 40, 1, 9, 22, 5, 64, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"), "qwen3")


def started(folder: Path, plugin: dict[str, Any] | None = None, **settings: Any) -> Any:
    given = {"max_model_len": 256, "gpu_memory_utilization": 0.2, "dtype": "float32", "max_num_seqs": 512, **settings}
    config = from_flat({"model": str(folder), **given, "plugin": {"cuda": plugin or {}}})
    return running(config, Registry.load())


def graphs_of(engine: Engine) -> Any:
    return engine.executor.call("run", {"function": lambda worker: worker.runner.device.graphs})[0]


def captured_and_all(engine: Engine) -> tuple[int, int]:
    """How many decode sizes have a graph, and how many there are. Keeps no graph, whose pieces keep the KV cache."""
    graphs = graphs_of(engine)
    return len(graphs._captured), len(graphs.sizes)


def test_positions_of_three_axes_in_captured_steps(tmp_path: Path) -> None:
    """Rows of a step are one row of positions that is read three times; padded decode steps are captured."""
    made(tmp_path, "qwen3_vl")
    with started(tmp_path, max_num_seqs=16, enforce_eager=True) as engine:
        expected = greedy(engine, GIVEN)
    with started(tmp_path, max_num_seqs=16) as engine:
        assert captured_and_all(engine)[0] > 0
        assert greedy(engine, GIVEN) == expected


def test_sizes_are_captured_at_the_start_then_while_idle_each_within_50_ms(folder: Path) -> None:
    with started(folder) as engine:
        graphs = graphs_of(engine)
        assert graphs._ready["decode"] == [1, 2, 4, 8, 16, 24, 32, 512]
        before = greedy(engine, GIVEN)
        taken, others = [], []
        while engine.has_idle_work():
            start, decodes = time.perf_counter(), len(graphs._captured)
            engine.step()
            kept = taken if len(graphs._captured) > decodes else others
            kept.append(time.perf_counter() - start)
        assert graphs._ready["decode"] == graphs.sizes
        print(f"graphs: {[round(1e3 * seconds) for seconds in taken]} ms, {graphs._used / 2**20:.1f} MiB "
              f"of {graphs._budget / 2**20:.1f} MiB reserved")  # fmt: skip
        print(f"other idle steps: {[round(1e3 * seconds) for seconds in others]} ms")
        assert sorted(taken)[len(taken) // 2] < 0.05
        assert graphs._used <= graphs._budget
        assert greedy(engine, GIVEN) == before


def test_replays_read_where_graphs_did(folder: Path) -> None:
    with started(folder, {"check_captured_inputs": True}) as engine:
        checked = greedy(engine, GIVEN)
    with started(folder, enforce_eager=True) as engine:
        assert greedy(engine, GIVEN) == checked


def test_graphs_stop_where_their_memory_is_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(folder, {"graph_memory_bytes": 1 << 20}) as engine:
        assert captured_and_all(engine) == (1, 29)
        found = greedy(engine, GIVEN)
    assert sum("captured steps stay" in line for line in caplog.messages) == 1
    with started(folder, {"graph_memory_bytes": 0}) as engine:
        assert not graphs_of(engine)._captured
        assert greedy(engine, GIVEN) == found


def test_an_attention_backend_that_needs_python_serves_eager(folder: Path) -> None:
    with started(folder, attention_backend="torch") as engine:
        assert not engine.has_idle_work()
        found = greedy(engine, GIVEN)
    with started(folder) as engine:
        assert greedy(engine, GIVEN) == found


def test_deterministic_steps_are_captured_after_they_were_met(folder: Path) -> None:
    with started(folder) as engine:
        while engine.has_idle_work():
            engine.step()
        first = greedy_deterministic(engine)
        assert engine.has_idle_work()
        while engine.has_idle_work():
            engine.step()
        assert graphs_of(engine)._ready["deterministic"]
        assert greedy_deterministic(engine) == first


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma2", "gpt2", "llama", "deepseek-v3"])
def test_steps_with_prompts_run_in_pieces(family: str, tmp_path: Path) -> None:
    """Chunks of prompts beside decodes, padded, captured and replayed: the tokens of an eager engine."""
    folder = make_checkpoint(tmp_path, family)
    asked = prompts(512, (3, 17, 90, 1, 9, 60, 5, 64, 30))
    settings = {"max_model_len": 128, "max_num_batched_tokens": 48, "enable_prefix_caching": False}
    with started(folder, enforce_eager=True, **settings) as engine:
        wanted = greedy(engine, asked)
    with started(folder, **settings) as engine:
        pieces = graphs_of(engine)._pieces
        assert pieces.sizes == [16, 32, 48]
        for _ in range(3):
            assert greedy(engine, asked) == wanted
            assert 48 in pieces._graphs
        start, alone = time.perf_counter(), prompts(512, (20,))
        assert greedy(engine, alone, 1) == greedy(engine, alone, 1)
        print(f"{family}: sizes that the driver refused first: {sorted(pieces._failed)}")
        print(f"{family}: two prompts of 20 tokens in {1e3 * (time.perf_counter() - start):.1f} ms")


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "gemma2", "llama"])
def test_while_idle_every_size_of_steps_with_prompts_is_captured(family: str, tmp_path: Path) -> None:
    """By steps of padding: then the first prompt of a size launches no more than a replay, and tokens are the same."""
    folder = make_checkpoint(tmp_path, family)
    asked = prompts(512, (3, 17, 90, 1, 9, 60, 5, 64, 30))
    settings = {"max_model_len": 128, "max_num_batched_tokens": 96, "max_num_seqs": 16, "enable_prefix_caching": False}
    with started(folder, enforce_eager=True, **settings) as engine:
        wanted = greedy(engine, asked)
    with started(folder, {"check_captured_inputs": True}, **settings) as engine:
        pieces = graphs_of(engine)._pieces
        assert not pieces._graphs, "none is captured before the first request"
        taken = []
        while engine.has_idle_work():
            start = time.perf_counter()
            engine.step()
            taken.append(round(1e3 * (time.perf_counter() - start)))
        print(f"{family}: idle steps of {taken} ms, sizes that the driver refused first: {sorted(pieces._failed)}")
        assert list(pieces._graphs) == [96, 64, 32, 16]
        model = engine.executor.call("run", {"function": lambda worker: worker.runner.model})[0]
        calls: list[int] = []
        handle = model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0].ids)))
        for tokens in (10, 20, 50, 90):
            greedy(engine, prompts(512, (tokens,)))
        assert not calls, f"steps of {calls} tokens were launched kernel by kernel"
        handle.remove()
        for _ in range(2):
            assert greedy(engine, asked) == wanted


def test_a_piece_that_the_driver_gives_up_leaves_the_allocator_as_it_was() -> None:
    device = torch.device("cuda", 0)
    capturer, given, other = PieceCapturer(device), torch.arange(1 << 16, device=device), torch.cuda.Stream(device)

    def record(wait: bool) -> tuple[Any, torch.Tensor]:
        with capturer.capture():
            capturer.begin()
            out = given + 1
            if wait:
                out.sum().item()
            return capturer.end(), out

    with pytest.raises(RuntimeError):
        record(True)
    capturer.forget()
    before = torch.cuda.memory_allocated(device)
    for _ in range(4):
        block = torch.ones(1 << 20, device=device)
        block.record_stream(other)
        del block
        torch.cuda.synchronize(device)
        torch.empty(1, device=device)  # looks for what other streams are done with
    assert torch.cuda.memory_allocated(device) <= before + (4 << 20), "what other streams used is never given back"
    replay, out = record(False)
    given.add_(1)
    replay()
    assert torch.equal(out, given + 1)


def greedy_deterministic(engine: Engine) -> list[list[int]]:
    from frame.testing.engines import drain, request, tokens_of

    asked = [request(str(index), prompt, 12, deterministic=True) for index, prompt in enumerate(GIVEN)]
    outputs = drain(engine, asked)
    return [tokens_of(outputs[str(index)]) for index in range(len(GIVEN))]
