"""Which blocks layers get: as long as their backend asks for, and about equally large in one pool."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.interfaces.attention import AttentionSpec
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.attention_binding import choose_backends
from frame.plugins.attention.torch import TorchAttention
from frame.testing.engines import greedy, prompts, running
from frame.testing.thread_executor import with_threads
from frame.testing.tiny import write_tiny

SETTINGS = {"max_model_len": 160, "num_gpu_blocks_override": 120, "dtype": "float32", "max_num_seqs": 8}
REGISTRY = Registry.load()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with a window and such without one."""
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "Gemma3ForCausalLM")
    return path


def answers(folder: Path, **given: Any) -> tuple[list[list[int]], Any]:
    with running(from_flat({"model": str(folder), **SETTINGS, **given}), REGISTRY) as engine:
        first = greedy(engine, prompts(300, (130, 3, 33, 1, 50)), 9)
        again = greedy(engine, prompts(300, (130, 3, 33, 1, 50)), 9)
        assert first == again, "tokens after a prefix from the cache differ"
        assert engine.stats().prefix_hits > 0
        assert engine.stats().kv_usage == 0
        return first, engine.scheduler._layout


def asking_for(multiple: int, windowed: int) -> Any:
    def block_multiple(cls: type, spec: AttentionSpec) -> int:
        return windowed if spec.window else multiple

    return classmethod(block_multiple)


@pytest.mark.parametrize(("multiple", "windowed"), [(32, 32), (1, 48), (64, 1), (24, 32)])
def test_tokens_do_not_depend_on_the_size_of_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, multiple: int, windowed: int
) -> None:
    plain, layout = answers(folder)
    assert {group.block_size for group in layout.groups} == {16}
    monkeypatch.setattr(TorchAttention, "block_multiple", asking_for(multiple, windowed))
    found, layout = answers(folder)
    assert found == plain
    for group in layout.groups:
        assert group.block_size % (windowed if group.specs[0].retention[1] else multiple) == 0
        assert layout.grain % group.block_size == group.block_size % layout.block_size == 0
    sizes = [spec.block_bytes(group.block_size) for group in layout.groups for spec in group.specs]
    assert max(sizes) < 2 * min(sizes)


def test_layers_of_a_group_may_keep_unequal_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the layers of a small draft model do beside those of its target."""
    from frame.core.layers.attention import Attention

    original = Attention.__init__

    def halved(self: Attention, build: Any, name: str, spec: AttentionSpec, **given: Any) -> None:
        original(self, build, name, spec, **given)
        if name.startswith("model.layers.1."):
            self.spec = self.backend_spec = type(spec)(**{**vars(spec), "kv_dtype": torch.bfloat16})

    monkeypatch.setattr(Attention, "__init__", halved)
    found, layout = answers(folder)
    assert any(len(set(group.specs)) == 2 for group in layout.groups)
    assert answers(folder, max_num_batched_tokens=13)[0] == found


def test_a_size_that_a_backend_cannot_serve_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "block_multiple", asking_for(64, 64))
    wanted = (
        r"^attention backend 'torch' cannot be used here: its blocks hold a multiple of 64 tokens, and block_size is 16"
        r": set it to auto, or to 64, or choose another backend$"
    )
    with pytest.raises(PluginError, match=wanted):
        answers(folder, block_size=16, attention_backend="torch")
    _, layout = answers(folder, block_size=128, attention_backend="torch")
    assert {group.block_size for group in layout.groups} == {128}


def test_a_backend_of_another_kind_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class LatentSpec:
        pass

    monkeypatch.setattr(TorchAttention, "spec_type", LatentSpec)
    spec = AttentionSpec(4, 2, 8, 1.0, torch.float32, torch.float32, 0, "cpu")

    class Layer:
        backend_spec = spec

        def kv_spec(self) -> None:
            return None

    with pytest.raises(PluginError, match=r"^no attention backend can be used here; (?!.*torch: )"):
        choose_backends({"a": Layer()}, from_flat({"model": ""}), REGISTRY)


def test_auto_is_a_word_and_the_default(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert from_flat({"block_size": "auto"}).cache.block_size == from_flat({}).cache.block_size == 0
    with caplog.at_level(logging.INFO):
        _, layout = answers(folder, block_size=8)
    assert {group.block_size for group in layout.groups} == {8}


@pytest.mark.parametrize(
    ("model", "ranks", "heads"),
    [
        ("Qwen3ForCausalLM", 1, [(0, 2)]),
        ("Qwen3ForCausalLM", 2, [(0, 1), (1, 2)]),
        ("Qwen3ForCausalLM", 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        ("DeepseekV2ForCausalLM", 2, [None, None]),
    ],
)
def test_caches_say_which_heads_lie_in_them(
    model: str, ranks: int, heads: list[tuple[int, int] | None], tmp_path: Path
) -> None:
    write_tiny(tmp_path, model)
    given = {"tensor_parallel_size": ranks, "executor": "threads", "num_threads": 1}
    with running(from_flat({"model": str(tmp_path), **SETTINGS, **given}), with_threads(Registry.load())) as engine:
        views = engine.executor.call("run", {"function": lambda worker: worker.started.views})
    assert [{view.heads for view in of_rank.values()} for of_rank in views] == [{own} for own in heads]
    for of_rank, own in zip(views, heads, strict=True):
        for view in of_rank.values():
            axis = view.format.head_axis
            assert (axis is None) == (own is None)
            if axis is not None and own is not None:
                assert view.format.shape[axis] == own[1] - own[0]
                assert view.total_heads == 2
