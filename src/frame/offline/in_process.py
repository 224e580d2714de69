"""An engine in the calling process, and its workers where its executor places them."""

from __future__ import annotations

from collections.abc import Callable

from frame.core.config.tree import FrameConfig
from frame.core.engine.assembly import EngineStart
from frame.core.engine.engine import Engine
from frame.core.interfaces.grammar import Vocabulary
from frame.core.plugin_host.registry import Registry
from frame.core.worker.factory import Workers


def make_engine(
    config: FrameConfig,
    registry: Registry,
    progress: Callable[[str], None] = lambda stage: None,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> Engine:
    """Builds and starts an engine at once; takes the arguments of `EngineStart` and raises its errors."""
    return EngineStart(config, registry, Workers, progress, vocabulary).finish()
