"""Other weights for a running engine: the configuration that names them, and whether they are of the same model."""

from __future__ import annotations

import re
from typing import Any

from .checkpoint import Checkpoint, find_folder
from .errors import ConfigError
from .tree import FrameConfig

#: Keys of config.json that change nothing that a serving model computes.
_INERT = re.compile(r"_.*|transformers_version|(torch_)?dtype|use_cache|initializer_.*|.*dropout.*|.*_token_id|.*_coef")
_MAX_NAMED = 4


def with_weights(
    config: FrameConfig, model: str | None = None, revision: str | None = None, load_format: str | None = None
) -> FrameConfig:
    """Returns the configuration with other weights: those of `model`, or without it of the same folder.

    The tokenizer stays the present one.
    """
    known = config.model
    if model is None:
        model, revision = known.model, revision if revision is not None else known.revision
    tokenizer = known.tokenizer if known.tokenizer is not None else str(find_folder(known.model, known.revision))
    changed = known.model_copy(update={"model": model, "revision": revision, "tokenizer": tokenizer})
    load = config.load if load_format is None else config.load.model_copy(update={"load_format": load_format})
    return config.model_copy(update={"model": changed, "load": load})


def require_same_model(old: Checkpoint, new: Checkpoint) -> None:
    """Raises `ConfigError` unless the two checkpoints differ in nothing but their weights."""
    if old.architecture != new.architecture:
        raise ConfigError(f"{new.folder} holds a {new.architecture}, the engine serves a {old.architecture}")
    before, after = _facts(old), _facts(new)
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if keys:
        named = ", ".join(
            f"{key} ({_shown(after.get(key))}, served {_shown(before.get(key))})" for key in keys[:_MAX_NAMED]
        )
        more = f" and {len(keys) - _MAX_NAMED} more" if len(keys) > _MAX_NAMED else ""
        raise ConfigError(f"{new.folder} holds another model than the engine serves: it differs in {named}{more}")


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts = {key: value for key, value in checkpoint.text.items() if not _INERT.fullmatch(key)}
    return {**facts, "architectures": None, "max_model_len": checkpoint.max_model_len, "pooling": checkpoint.pooling}


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value!r:.60}"
