"""An engine in the calling process, and its workers where its executor places them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from frame.core.config.tree import FrameConfig
from frame.core.engine.assembly import EngineStart
from frame.core.engine.engine import Engine
from frame.core.interfaces.grammar import Vocabulary
from frame.core.plugin_host.registry import Registry
from frame.core.worker.factory import Workers
from frame.links.early_workers import EarlyWorkers


def make_engine(
    config: FrameConfig,
    registry: Registry,
    progress: Callable[[str], None] = lambda stage: None,
    vocabulary: Callable[[], Vocabulary] | None = None,
    begun: EarlyWorkers | None = None,
) -> Engine:
    """Builds and starts an engine at once; takes the arguments of `EngineStart` and raises its errors.

    Worker processes that were `begun` before become its workers.
    """
    return EngineStart(config, registry, partial(Workers, begun=begun), progress, vocabulary).finish()
