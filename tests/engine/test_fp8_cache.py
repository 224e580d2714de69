"""A KV cache of 8-bit floats: how far log-probabilities move, how many blocks fit, whose scales count."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, tensor

from frame.core.config.flat import from_flat
from frame.core.engine.agreement import agreed_layout
from frame.core.engine.engine import Engine
from frame.core.interfaces.engine import EngineOutput
from frame.core.interfaces.kv import KVLayout
from frame.core.plugin_host.registry import Registry
from frame.core.worker.worker import Worker
from frame.interfaces import Mesh, Placement
from frame.testing.engines import drain, prompts, request, running, tokens_of
from frame.testing.tiny import write_tiny

PROMPTS = prompts(512, (60, 33, 17))
NUM_TOKENS = 16
#: How far the log-probability of a known token moves at most, and on average a third of it. A key or value keeps 4
#: significant bits (e4m3) or 3 (e5m2); the weights are rougher than trained ones.
MOVES = {"fp8_e4m3": 0.5, "fp8_e5m2": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "Qwen3ForCausalLM")
    return path


def config_of(folder: Path, **given: Any) -> Any:
    base = {"model": str(folder), "max_model_len": 128, "num_gpu_blocks_override": 100, "dtype": "float32"}
    return from_flat({**base, **given})


def answers(folder: Path, **given: Any) -> dict[str, list[EngineOutput]]:
    with running(config_of(folder, **given), Registry.load()) as engine:
        return all_answers(engine)


def all_answers(engine: Engine, **params: Any) -> dict[str, list[EngineOutput]]:
    params = {"prompt_logprobs": 1, "logprobs": 2, **params}
    asked = [request(str(index), prompt, NUM_TOKENS, **params) for index, prompt in enumerate(PROMPTS)]
    return drain(engine, asked)


def prompt_scores(outputs: list[EngineOutput]) -> np.ndarray:
    """The log-probability of each prompt token but the first."""
    rows = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return np.concatenate([part.logprobs[:, 0] for part in rows])


@pytest.fixture(scope="module")
def exact(folder: Path) -> dict[str, list[EngineOutput]]:
    return answers(folder)


@pytest.mark.parametrize("dtype", MOVES)
def test_scores_move_little_and_greedy_tokens_change_at_near_ties_only(
    folder: Path, exact: dict[str, list[EngineOutput]], dtype: str
) -> None:
    found = answers(folder, kv_cache_dtype=dtype)
    for name, want in exact.items():
        moved = np.abs(prompt_scores(found[name]) - prompt_scores(want))
        assert 0 < moved.max() < MOVES[dtype]
        assert moved.mean() < MOVES[dtype] / 3
        first, second = tokens_of(found[name]), tokens_of(want)
        place = next((i for i in range(NUM_TOKENS) if first[i] != second[i]), None)
        if place is not None:
            (best, next_best) = np.concatenate([one.logprobs.logprobs for one in want if one.logprobs])[place, 1:3]
            assert best - next_best < MOVES[dtype], f"prompt {name}, token {place}"


def layout_of(folder: Path, **given: Any) -> KVLayout:
    config = config_of(folder, num_gpu_blocks_override=None, kv_cache_memory_bytes=3 << 18, **given)
    worker = Worker(config, REGISTRY, Placement())
    try:
        return agreed_layout(config, Mesh(), [worker.load()])
    finally:
        worker.close()


REGISTRY = Registry.load()


def test_the_same_memory_holds_twice_as_many_blocks_as_bfloat16(folder: Path) -> None:
    whole, half, eighth = (layout_of(folder, kv_cache_dtype=name) for name in ("float32", "bfloat16", "fp8_e4m3"))
    assert eighth.pools[0] == 2 * half.pools[0] == 4 * whole.pools[0]


def with_scales(folder: Path, to: Path, scales: dict[str, Tensor]) -> Path:
    """A copy of the checkpoint that also holds `scales`."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    save_file({**weights, **scales}, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale", "kv_scale")]
)
def test_scales_come_from_the_checkpoint(folder: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    scales = {f"model.layers.{layer}.self_attn.{name}": tensor([0.125]) for layer in range(3) for name in names}
    scales[f"model.layers.0.self_attn.{names[0]}"] = tensor(0.125)  # as a number, not a list of one
    scaled = with_scales(folder, tmp_path / "scaled", scales)
    worker = Worker(config_of(scaled, kv_cache_dtype="fp8_e4m3"), REGISTRY, Placement())
    facts = worker.load()
    layout = agreed_layout(worker.config, Mesh(), [facts])
    worker.allocate(layout)
    layers = [module.params for module in worker.started.model.modules() if hasattr(module, "kv_scales")]
    assert [(one.key_scale, one.value_scale) for one in layers] == [(0.125, 0.125)] * len(layers)
    worker.close()
    assert layout.numerics != layout_of(folder, kv_cache_dtype="fp8_e4m3").numerics


def test_scales_move_the_range_and_other_caches_do_not_read_them(folder: Path, tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.self_attn.{part}_scale": tensor(0.125) for layer in range(3) for part in "kv"}
    scaled = with_scales(folder, tmp_path / "scaled", scales)
    # a power of two only moves the range, so what fits in either is kept alike
    found, plain = (answers(one, kv_cache_dtype="fp8_e5m2") for one in (scaled, folder))
    assert all(np.allclose(prompt_scores(found[name]), prompt_scores(plain[name]), atol=1e-3) for name in found)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf")])
def test_a_scale_that_is_no_positive_number_stops_the_start(folder: Path, tmp_path: Path, scale: float) -> None:
    scaled = with_scales(folder, tmp_path / "wrong", {"model.layers.1.self_attn.k_scale": tensor(scale)})
    worker = Worker(config_of(scaled, kv_cache_dtype="fp8_e4m3"), REGISTRY, Placement())
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.k_scale is .*must be above 0"):
        worker.load()
    worker.close()


def test_blocks_of_another_type_are_other_blocks(folder: Path) -> None:
    names = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
    assert len({layout_of(folder, kv_cache_dtype=name).numerics for name in names}) == len(names)


def test_deterministic_requests_have_the_same_bits_in_any_chunks_and_from_the_cache(folder: Path) -> None:
    given = {"kv_cache_dtype": "fp8_e4m3", "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with running(config_of(folder, **given), REGISTRY) as engine:
        cold = all_answers(engine, deterministic=True, prompt_logprobs=None)
        warm = all_answers(engine, deterministic=True, prompt_logprobs=None)
        alone = [
            drain(engine, [request("a", prompt, NUM_TOKENS, deterministic=True, logprobs=2)])["a"] for prompt in PROMPTS
        ]
    for index, want in enumerate(alone):
        for found in (cold[str(index)], warm[str(index)]):
            assert bits(found) == bits(want)


def bits(outputs: list[EngineOutput]) -> tuple[Any, ...]:
    return tuple(tokens_of(outputs)), b"".join(one.logprobs.logprobs.tobytes() for one in outputs if one.logprobs)
