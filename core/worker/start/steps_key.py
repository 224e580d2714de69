"""What decides the steps of a worker: two starts with the same key launch the same kernels on the same platform."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.mesh import Placement
from ...interfaces.provider import API_VERSION

#: Settings of these parts change no step.
_BESIDE = ("server", "observability", "structured_outputs", "kv_events", "kept_weights")
#: Settings of the model that say where its files are and what it is called: what counts is what the files say.
_NAMES = ("model", "revision", "tokenizer", "served_model_name")


def steps_key(config: FrameConfig, checkpoint: Checkpoint, placement: Placement) -> str:
    """A digest of the configuration, of what the model's small files say and of the worker's place.

    Empty for settings that cannot be written down, such as classes of an embedding program.
    """
    try:
        plain = {name: part for name, part in config.to_plain().items() if name not in _BESIDE}
    except ValueError:
        return ""
    plain["model"] = {name: value for name, value in plain["model"].items() if name not in _NAMES}
    stored = {one.name: getattr(checkpoint, one.name) for one in fields(checkpoint) if one.name != "folder"}
    place = [placement.rank, placement.local_rank, str(placement.mesh)]
    facts = [plain, stored, place, API_VERSION]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
