"""Latent attention over several ranks: heads and experts are divided, latents are on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frame.core.config.checkpoint import read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.layout.check import check_layout
from frame.layout.parts import engine_parts
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.thread_executor import with_threads


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    values = {**SMALL, "model": str(folder), "num_threads": 1, **settings}
    if settings:
        values["executor"] = "threads"
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        found: list[list[int]] = greedy(engine, prompts(400))
        return found


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek-v3", {"tensor_parallel_size": 2}),
        ("deepseek-v3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("deepseek-v2", {"pipeline_parallel_size": 2}),
        ("deepseek-v32", {"tensor_parallel_size": 2}),
        ("longcat-flash", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("longcat-flash", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
        ("minicpm3", {"tensor_parallel_size": 4}),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(name.split("_")[0] for name in given),
)
def test_ranks_give_the_tokens_of_one(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    assert tokens(tmp_path, **settings) == tokens(tmp_path)


def refusal(folder: Path, **settings: Any) -> str:
    config = from_flat({"model": str(folder), **settings})
    with pytest.raises(ConfigError) as raised:
        check_layout(config, mesh_of(config), read_checkpoint(config), Registry.load())
    return str(raised.value)


def test_contexts_that_ranks_would_share_are_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v3")
    assert refusal(tmp_path, tensor_parallel_size=2, decode_context_parallel_size=2) == (
        "decode_context_parallel_size 2: model.layers.0.self_attn is latent attention, of whose cache every device has "
        "all tokens: 2 devices cannot share the context of a request; sizes that work: 1"
    )
    said = "prefill_context_parallel_size 2: model.layers.0.self_attn is a LatentAttention, which needs all tokens"
    assert refusal(tmp_path, prefill_context_parallel_size=2).startswith(said)


def test_a_stage_does_not_begin_with_a_layer_that_shares_a_choice(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm-moe-dsa")  # the second of three layers shares the choice of the first
    assert tokens(tmp_path, pipeline_parallel_size=2, pipeline_layers=[2, 1]) == tokens(tmp_path)
    config = from_flat({"model": str(tmp_path), "pipeline_parallel_size": 2, "pipeline_layers": [1, 2]})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn shares the choice of model\.layers\.0"):
        engine_parts(config, read_checkpoint(config), "float32")


def test_each_rank_holds_all_latents_and_its_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v32")
    config = from_flat({"model": str(tmp_path), "tensor_parallel_size": 2})
    parts = engine_parts(config, read_checkpoint(config), "float32").ranks
    assert len(parts) == 2
    for part in parts:
        sizes = {spec.block_bytes(16) for spec in part.kv_specs.values()}
        assert sizes == {16 * (32 + 8) * 4, 16 * 16 * 4}  # latents, and keys of the index
        assert {spec.num_heads for spec in part.attention.values()} == {2, 8}
