"""Asks for a worker's weights before anything is loaded, and makes what holds them."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path

import msgspec

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.held_memory import HeldPiece
from frame.core.interfaces.mesh import Placement
from frame.core.interfaces.platform import Platform

from .exchange import ask
from .holder import NoHolder, WeightHolder, WeightTable
from .key import weights_key
from .messages import Ask, Drop

logger = logging.getLogger("frame.worker")


def weight_holder(config: FrameConfig, folder: Path, platform: Platform, placement: Placement) -> NoHolder:
    """What holds the weights of the checkpoint `folder` for this worker; the null object where none are kept.

    To be called before the device's memory is looked at: memory of other weights is given back first.
    """
    address, rank = config.kept_weights.weight_keeper, placement.rank
    if not address:
        return NoHolder()
    against = _against(config)
    try:
        if against:
            ask(address, Drop(rank))
            raise ValueError(against)
        key_of = partial(weights_key, placement=placement, device=platform.device_type)
        key = key_of(config, folder)
        answer, files = ask(address, Ask(rank, key))
        pieces = [HeldPiece(*piece) for piece in zip(files, answer.sizes, strict=True)]
        memory = platform.held_memory(pieces)
        if memory is None:
            raise ValueError(f"platform {platform.setup.plugin or platform.device_type!r} has no such memory")
        kept = msgspec.msgpack.decode(answer.table, type=WeightTable) if pieces else None
        if answer.other:
            why = "they are of other files or settings, or half changed"
            logger.warning("rank %d: weights were kept, and are loaded anew: %s", rank, why)
    except (OSError, RuntimeError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            ask(address, Drop(rank))  # or it would lie there unused
        logger.warning("rank %d: the server keeps no weights: %s", rank, error)
        return NoHolder()
    return WeightHolder(memory, platform.device, address, rank, key_of, (config, folder), key, kept)


def _against(config: FrameConfig) -> str:
    """Why the weights cannot be kept; empty where they can."""
    if config.expert_balance.enable_eplb:
        return "enable_eplb moves experts while the engine serves"
    if config.weight_offload.cpu_offload_gb:
        return "cpu_offload_gb keeps some in the engine's own memory"
    return ""
