"""The largest step, which is run before there is a KV cache: for every way to divide a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.attention_binding import choose_backends
from frame.core.worker.start.model_loading import load_model
from frame.core.worker.start.open_device import open_device
from frame.core.worker.start.profile import profile_step
from frame.interfaces import Mesh, Placement
from frame.kept_weights.holder import NoHolder
from frame.plugins.models.encoder_decoder import Stack
from frame.testing.checkpoints import make_checkpoint
from frame.testing.encoder_decoders import make_encoder_decoder


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=2), Mesh(tensor=2, decode_context=2)], ids=["1", "tp2", "dcp2"])
def test_the_largest_step_runs_without_a_cache(mesh: Mesh, tmp_path: Path) -> None:
    _profile(make_checkpoint(tmp_path, "llama"), mesh)


def test_the_largest_step_runs_where_each_head_has_scales(tmp_path: Path) -> None:
    _profile(make_checkpoint(tmp_path, "llama"), Mesh(), kv_cache_dtype="fp8_e4m3", calculate_kv_scales=True)


def test_the_largest_step_has_an_encoder_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(Stack, "forward", lambda self, embedded, *_: read.append(len(embedded)) or embedded)
    _profile(make_encoder_decoder(tmp_path, "t5"), Mesh())
    assert read == [64, 64]  # of the encoder, of the decoder
    monkeypatch.undo()
    _profile(tmp_path, Mesh(tensor=2))


def _profile(folder: Path, mesh: Mesh, **given: Any) -> None:
    given |= {"tensor_parallel_size": mesh.tensor, "decode_context_parallel_size": mesh.decode_context}
    config = FrameConfig.from_flat(model=str(folder), max_num_batched_tokens=64, max_num_seqs=4, **given)
    registry = Registry.load()
    opened = open_device(config, registry, Placement(mesh=mesh), "")
    before = opened.platform.memory().snapshot()
    loaded = load_model(config, opened.checkpoint, opened.platform, registry, opened.groups, before, NoHolder())
    choose_backends(loaded.build.caches, config, registry, loaded.build.own_caches)
    profile_step(config, opened.checkpoint, loaded, opened.platform)
