"""`calculate_kv_scales`: the first tokens that are served decide the scales of an 8-bit KV cache, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.config.errors import ConfigError
from frame.core.engine.engine import Engine
from frame.core.plugin_host.registry import Registry
from frame.plugins.attention.torch import TorchAttention
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import drain, greedy, request, running, tokens_of
from frame.testing.thread_executor import with_threads
from frame.testing.tiny import write_tiny
from tests.engine.test_fp8_cache import PROMPTS, all_answers, config_of, prompt_scores, with_scales

#: Largest keys and values of a few tokens lie up to so many times below the cache's largest number, 448.
MOST, LEAST = 448 / 2, 448 / 4
CALCULATED = {"kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys are far beyond the range of the type, so that scales of 1 cut them off."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "Qwen3ForCausalLM")
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("k_norm.weight"):
            weights[name] *= 3000
        if name.endswith("q_norm.weight"):
            weights[name] /= 3000
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@contextmanager
def engine_of(folder: Path, ranks: int = 1, **given: Any) -> Iterator[tuple[Engine, list[list[Any]]]]:
    """The engine, and the scaled layers of each of its workers."""
    given = {**CALCULATED, **given}
    if ranks > 1:
        given |= {"tensor_parallel_size": ranks, "executor": "threads", "num_threads": 1}
    with running(config_of(folder, **given), with_threads(Registry.load())) as engine:
        workers = engine.executor.call("run", {"function": lambda worker: worker})
        yield engine, [[one for one in worker.model.modules() if hasattr(one, "kv_scales")] for worker in workers]


def scores(engine: Engine) -> np.ndarray:
    found = all_answers(engine)
    return np.concatenate([prompt_scores(found[name]) for name in sorted(found)])


def largest(folder: Path, prompt: list[int]) -> list[list[float]]:
    """The largest key and value of each layer, as transformers caches them in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        cached = model(torch.tensor([prompt]), use_cache=True).past_key_values
    return [[float(x.abs().max()) for x in (layer.keys, layer.values)] for layer in cached.layers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_prompt_decides_and_nothing_changes_it(folder: Path, ranks: int) -> None:
    with engine_of(folder, ranks) as (engine, workers):
        assert {scale for layers in workers for one in layers for scale in one.kv_scales.flatten().tolist()} == {1.0}
        cold = tokens_of(drain(engine, [request("first", PROMPTS[0])])["first"])
        scales = [[one.kv_scales.tolist() for one in layers] for layers in workers]
        for layers in scales:
            for found, most in zip(layers, largest(folder, PROMPTS[0]), strict=True):
                for of_heads, one in zip(found, most, strict=True):
                    assert len(set(of_heads)) == 1
                    assert LEAST <= one / of_heads[0] <= MOST * 1.001
        warm = tokens_of(drain(engine, [request("again", PROMPTS[0])])["again"])  # its blocks were cached meanwhile
        assert warm == cold
        greedy(engine, PROMPTS[1:])
        assert [[one.kv_scales.tolist() for one in layers] for layers in workers] == scales


def test_scores_are_near_those_of_a_cache_in_float32(folder: Path) -> None:
    with running(config_of(folder), Registry.load()) as engine:
        exact = scores(engine)
    with running(config_of(folder, kv_cache_dtype="fp8_e4m3"), Registry.load()) as engine:
        cut_off = np.abs(scores(engine) - exact)
    with engine_of(folder) as (engine, _):
        moved = np.abs(scores(engine) - exact)
    assert moved.max() < 0.5 < cut_off.max()


def test_a_backend_need_not_know(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(folder) as (engine, _):
        wanted = scores(engine)
    monkeypatch.setattr(TorchAttention, "takes_head_scales", False)
    with engine_of(folder) as (engine, _):
        assert np.allclose(scores(engine), wanted, atol=1e-4)


def test_a_request_cannot_ask_for_bits_that_an_earlier_one_decides(folder: Path) -> None:
    with engine_of(folder) as (engine, _):
        assert engine.info.not_deterministic.startswith("the scales of its KV cache follow from the first request")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "calculate_kv_scales: kv_cache_dtype bfloat16 has no scales"),
        ({"kv_cache_dtype": "auto"}, "calculate_kv_scales: no layer keeps keys and values in a cache of 8-bit floats"),
        (
            {"kv_connector": "peer"},
            "calculate_kv_scales: KV connector 'peer' moves blocks to engines with other scales",
        ),
        ({"deterministic": True}, "calculate_kv_scales: deterministic needs scales that do not follow from requests"),
    ],
)
def test_what_does_not_go_with_it_is_named(folder: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=words), engine_of(folder, **given):
        pass


def test_the_scales_of_a_checkpoint_count(folder: Path, tmp_path: Path) -> None:
    known = with_scales(folder, tmp_path / "known", {"model.layers.2.self_attn.v_scale": torch.tensor(0.5)})
    words = "calculate_kv_scales: the checkpoint has scales for model.layers.2.self_attn"
    with pytest.raises(ValueError, match=words), engine_of(known):
        pass


def test_latents_have_no_scales_to_calculate(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v2")
    words = "calculate_kv_scales: no layer keeps keys and values"
    with pytest.raises(ValueError, match=words), engine_of(tmp_path, kv_cache_dtype="auto"):
        pass
