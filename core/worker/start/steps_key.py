"""What decides the steps of a worker: two starts with the same key launch the same kernels on the same platform."""

from __future__ import annotations

import hashlib
import json

from ...config.checkpoint import Checkpoint
from ...config.tree import FrameConfig
from ...interfaces.mesh import Placement
from ...interfaces.provider import API_VERSION

#: Settings of these parts change no step.
_BESIDE = ("server", "observability", "structured_outputs", "kv_events", "kept_weights")


def steps_key(config: FrameConfig, checkpoint: Checkpoint, placement: Placement) -> str:
    """A digest of the configuration, the model's `config.json` and the worker's place.

    Empty for settings that cannot be written down, such as classes of an embedding program.
    """
    try:
        plain = {name: part for name, part in config.to_plain().items() if name not in _BESIDE}
    except ValueError:
        return ""
    place = [placement.rank, placement.local_rank, str(placement.mesh)]
    facts = [plain, checkpoint.hf, place, API_VERSION]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
