"""Plans one KV cache for all workers from their facts, and hashes what decides the bits in its blocks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence

from msgspec import structs

from ..config.tree import FrameConfig
from ..interfaces.executor import WorkerFacts
from ..interfaces.kv import KVLayout
from ..interfaces.kv_layout import common_pools, plan_layout, with_blocks, with_checkpoints
from ..interfaces.mesh import Mesh
from ..interfaces.wire import encode

logger = logging.getLogger("frame.engine")


def agreed_layout(config: FrameConfig, mesh: Mesh, facts: Sequence[WorkerFacts]) -> KVLayout:
    """The KV cache of all workers, each pool as large as the worker with the least memory can hold.

    Raises `RuntimeError` when a worker is missing or has loaded another model, `ValueError` when not even two blocks
    fit.
    """
    if len(facts) != mesh.engine_size:
        raise RuntimeError(f"{len(facts)} of {mesh.engine_size} workers were loaded: the executor has lost some")
    if len({fact.model for fact in facts}) > 1:
        raise RuntimeError("the workers have loaded different weights: all must read the same checkpoint")
    first, cache = facts[0], config.cache
    multiples = {layer: math.lcm(*(fact.block_multiples.get(layer, 1) for fact in facts)) for layer in first.kv_specs}
    layout = plan_layout(first.kv_specs, cache.block_size, multiples)
    _check_states(config, layout)
    if cache.enable_prefix_caching:
        layout = with_checkpoints(layout)
    kept = [fact for fact in facts if any(fact.pool_bytes)] or facts  # a stage may keep nothing
    fitting = [
        with_blocks(
            layout,
            fact.kv_bytes,
            cache.num_gpu_blocks_override,
            num_states=config.scheduler.max_num_seqs,
            bytes_of_pools=fact.pool_bytes,
        ).pools
        for fact in kept
    ]
    pools = common_pools(fitting, [fact.pool_bytes for fact in kept])
    return structs.replace(layout, pools=pools, numerics=numerics(mesh, facts), model=first.model)


def _check_states(config: FrameConfig, layout: KVLayout) -> None:
    """Raises `ValueError` for settings that cannot be combined with layers that keep a running state."""
    states = [group.layers[0] for group in layout.groups if group.keeps_states]
    if not states:
        return
    kept = f"layer {states[0]!r} keeps a running state of each request"
    if config.transfer.kv_connector is not None and not config.cache.enable_prefix_caching:
        raise ValueError(
            f"{kept}, and KV connectors move copies that prefix caching makes: set enable_prefix_caching, or leave "
            "kv_connector out for this model"
        )
    if config.model.deterministic:
        raise ValueError(
            f"{kept}, whose bits depend on how a prompt is divided: leave deterministic out for this model"
        )
    if config.speculation.speculator is not None:
        raise ValueError(f"{kept}, which rejected drafts would spoil: leave the speculator out for this model")


def numerics(mesh: Mesh, facts: Sequence[WorkerFacts]) -> str:
    """A hash of how work is divided, of every worker's digest and of the model, so that no two divisions share blocks.

    Data-parallel engines compute the same bits, so their number is left out, unless they share experts.
    """
    engines = mesh.data if mesh.expert_parallel else 1
    parts = [mesh.pipeline, mesh.tensor, engines, [[fact.digest, fact.model] for fact in facts]]
    return hashlib.sha256(encode(parts)).hexdigest()
