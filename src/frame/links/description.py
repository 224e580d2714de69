"""What a machine that starts engines for a server says of itself, and the server of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frame.core.config.checkpoint import find_folder
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.setups import shared_settings

from .versions import fingerprints, versions

#: Settings that may differ: a machine's own paths, and what only the machine that serves HTTP reads.
_OWN = (
    *(f"model.{name}" for name in ("revision", "tokenizer", "served_model_name", "chat_template", "generation_config")),
    *(f"load.{name}" for name in ("model_source", "download_dir", "offline")),
)
_GROUPS = (
    "model", "pooler", "cache", "scheduler", "executor", "expert_balance", "attention", "speculation", "load",
    "transfer", "structured_outputs",
)  # fmt: skip


def described(config: FrameConfig) -> dict[str, Any]:
    """What a machine says of itself, as JSON values: its engines' ranks, versions, settings and model."""
    settings = shared_settings(config, *_GROUPS, own=_OWN)
    settings["data_parallel.data_parallel_size"] = config.data_parallel.data_parallel_size
    settings |= fingerprints(find_folder(config.model.model, config.model.revision))
    return {"ranks": list(config.data_parallel.local_ranks), "versions": versions(), "settings": settings}


def listed(ranks: Sequence[int]) -> str:
    """Engines in a sentence: "engine 2", "engines 2, 3"."""
    return f"engine{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
