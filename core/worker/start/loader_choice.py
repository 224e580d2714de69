"""Which loader reads a checkpoint's weights."""

from __future__ import annotations

from typing import Any

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.setup import LoaderSetup
from ...plugin_host.registry import Registry


def choose_loader(config: FrameConfig, checkpoint: Checkpoint, registry: Registry) -> Any:
    """The weight loader named by `load_format`, or for "auto" the preferred one that can read the folder."""
    name, folder = config.load.load_format, checkpoint.folder
    setup = LoaderSetup(
        folder, named=name != "auto", seed=config.model.seed, strategy=config.load.safetensors_load_strategy
    )
    reasons = []
    for provider in [registry.choose("loader", name)] if setup.named else registry.providers("loader"):
        loader = registry.make("loader", provider, setup, config)
        if not (reason := loader.supports(folder)):
            return loader
        reasons.append(reason if setup.named else f"{provider.name}: {reason}")
    refused = f"load format {name!r} cannot" if setup.named else "no weight loader can"
    raise ValueError(f"{refused} read {folder}: {'; '.join(reasons)}")
