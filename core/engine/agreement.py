"""What the facts of an engine's workers make together: one KV cache, and the name of what decides its bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec import structs

from ..config.tree import FrameConfig
from ..interfaces.executor import WorkerFacts
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import group_layers, plan_layout, with_blocks
from ..interfaces.mesh import Mesh
from ..interfaces.wire import encode


def agreed_layout(config: FrameConfig, mesh: Mesh, facts: Sequence[WorkerFacts]) -> KVLayout:
    """The KV cache of all workers, as large as the poorest one can hold.

    Raises `RuntimeError` when a worker is missing, `ValueError` when not even two blocks fit.
    """
    if len(facts) != mesh.size:
        raise RuntimeError(f"{len(facts)} of {mesh.size} workers were loaded: the executor has lost some")
    layout = plan_layout(group_layers(facts[0].kv_specs, config.cache.block_size))
    available = min(fact.kv_bytes for fact in facts)
    layout = with_blocks(layout, available, config.cache.num_gpu_blocks_override)
    return structs.replace(layout, numerics=numerics(mesh, facts))


def numerics(mesh: Mesh, facts: Sequence[WorkerFacts]) -> str:
    """A hash of how work is divided and of every worker's digest, so that no two divisions share blocks.

    Data-parallel engines compute the same bits, so their number is left out.
    """
    parts = [mesh.pipeline, mesh.tensor, [fact.digest for fact in facts]]
    return hashlib.sha256(encode(parts)).hexdigest()
