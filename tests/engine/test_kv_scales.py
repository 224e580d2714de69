"""Scales of a KV cache of 8-bit floats for each KV head: whose they are, over ranks, and for any attention backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import tensor

from frame.core.engine.agreement import agreed_layout
from frame.core.plugin_host.registry import Registry
from frame.core.worker.worker import Worker
from frame.interfaces import Mesh, Placement
from frame.plugins.attention.torch import TorchAttention
from frame.testing.engines import running
from frame.testing.thread_executor import with_threads
from frame.testing.tiny import write_tiny
from tests.engine.test_fp8_cache import all_answers, config_of, prompt_scores, with_scales

#: Powers of two, which only move the range of a float.
KEYS, VALUES = tensor([0.125, 2.0]), tensor([0.5, 0.0625])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "Qwen3ForCausalLM")
    return path


def scaled(folder: Path, to: Path, form: tuple[int, ...] = (2, 1, 1), values: torch.Tensor = VALUES) -> Path:
    """The checkpoint with scales of each of its two KV heads, which lie in a tensor of `form`."""
    names = [f"model.layers.{layer}.self_attn" for layer in range(3)]
    keys = {f"{name}.k_scale": KEYS.bfloat16().reshape(form).clone() for name in names}
    return with_scales(folder, to, keys | {f"{name}.v_scale": values.reshape(form).clone() for name in names})


def scores(folder: Path, ranks: int = 1, **given: Any) -> np.ndarray:
    if ranks > 1:
        given |= {"tensor_parallel_size": ranks, "executor": "threads", "num_threads": 1}
    config = config_of(folder, kv_cache_dtype="fp8_e5m2", **given)
    with running(config, with_threads(Registry.load())) as engine:
        found = all_answers(engine)
    return np.concatenate([prompt_scores(found[name]) for name in sorted(found)])


@pytest.fixture(scope="module")
def plain(folder: Path) -> np.ndarray:
    """What scales of 1 give: in a wide type, powers of two change nothing but rounding of sums."""
    return scores(folder)


@pytest.mark.parametrize("given", [{}, {"ranks": 2}, {"ranks": 2, "decode_context_parallel_size": 2}], ids=str)
def test_each_head_has_its_own_scales_on_any_rank(
    folder: Path, plain: np.ndarray, tmp_path: Path, given: dict[str, Any]
) -> None:
    found = scores(scaled(folder, tmp_path / "scaled"), **given)
    assert np.allclose(found, plain, atol=1e-3)


def test_a_scale_acts_on_its_own_head_alone(folder: Path, plain: np.ndarray, tmp_path: Path) -> None:
    narrow = scores(scaled(folder, tmp_path / "narrow", (2,), tensor([0.5, 1e-9])))  # so that one head is cut off
    worse = np.abs(narrow - plain)
    assert worse.max() > 0.1
    both = scores(scaled(folder, tmp_path / "both", (2,), tensor([1e-9, 1e-9])))
    assert np.abs(both - narrow).max() > 0.1


def test_a_backend_that_takes_numbers_is_given_what_is_scaled_already(
    folder: Path, plain: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchAttention, "takes_head_scales", False)
    assert np.allclose(scores(scaled(folder, tmp_path / "scaled"), 2, decode_context_parallel_size=2), plain, atol=1e-3)
    assert np.allclose(scores(tmp_path / "scaled"), plain, atol=1e-3)


def test_scales_that_are_equal_are_one_number(folder: Path, tmp_path: Path) -> None:
    equal = scaled(folder, tmp_path / "equal", (2,), tensor([0.25, 0.25]))
    name = "model.layers.1.self_attn.k_scale"
    equal = with_scales(equal, tmp_path / "of one layer", {name: torch.full((2,), 0.125)})
    worker = Worker(config_of(equal, kv_cache_dtype="fp8_e4m3"), Registry.load(), Placement())
    layout = agreed_layout(worker.config, Mesh(), [worker.load()])
    worker.allocate(layout)
    layers = [one.params for one in worker.model.modules() if getattr(one, "kv_scales", None) is not None]
    assert [isinstance(one.key_scale, torch.Tensor) for one in layers] == [True, False, True]
    assert (layers[1].key_scale, layers[1].value_scale) == (0.125, 0.25)
    worker.close()


def test_scales_of_another_number_of_heads_are_named(folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_scale"
    wrong = with_scales(folder, tmp_path / "wrong", {name: torch.ones(3)})
    worker = Worker(config_of(wrong, kv_cache_dtype="fp8_e4m3"), Registry.load(), Placement())
    with pytest.raises(ValueError, match=rf"{name} is \[3\]"):
        worker.load()
    worker.close()
