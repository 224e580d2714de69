"""A worker extension that tells what lies in each slot of experts, for tests."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from frame.core.layers.experts import experts_of
from frame.interfaces import WorkerExtension


def digest(*weights: Tensor) -> str:
    """A short hash of weights."""
    return hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in weights)).hexdigest()[:16]


class ExpertSlots(WorkerExtension):
    """Reads maps and weights of this worker's layers of experts."""

    def slots(self) -> list[dict[str, Any]]:
        """Of each layer its name, the first slot here, the expert that each slot has by the map, and their digests."""
        return [
            {
                "layer": layer.prefix,
                "first": layer.first,
                "all": None if layer.map is None else layer.map.expert_of.tolist(),
                "experts": layer.held,
                "digests": [digest(*(rows[slot] for rows in layer.method.rows(layer))) for slot in range(layer.count)],
            }
            for layer in experts_of(self.setup.model)
        ]
