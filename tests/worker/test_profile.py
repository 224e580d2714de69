"""The largest step, which is run before there is a KV cache: for every way to divide a layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.core.worker.start.model_loading import load_model
from frame.core.worker.start.open_device import open_device
from frame.core.worker.start.profile import profile_step
from frame.interfaces import Mesh, Placement
from frame.testing.checkpoints import make_checkpoint


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tensor=2), Mesh(tensor=2, decode_context=2)], ids=["1", "tp2", "dcp2"])
def test_the_largest_step_runs_without_a_cache(mesh: Mesh, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    sizes = {"tensor_parallel_size": mesh.tensor, "decode_context_parallel_size": mesh.decode_context}
    config = FrameConfig.from_flat(model=str(folder), max_num_batched_tokens=64, max_num_seqs=4, **sizes)
    registry = Registry.load()
    opened = open_device(config, registry, Placement(mesh=mesh), "")
    before = opened.platform.memory().snapshot()
    loaded = load_model(config, opened.checkpoint, opened.platform, registry, opened.groups, before)
    profile_step(config, opened.checkpoint, loaded, opened.platform)
