"""An engine in the calling process, and its workers where its executor places them."""

from __future__ import annotations

from collections.abc import Callable

from ..config.tree import FrameConfig
from ..engine.assembly import EngineStart
from ..engine.engine import Engine
from ..interfaces.grammar import Vocabulary
from ..plugin_host.registry import Registry
from ..worker.factory import Workers


def make_engine(
    config: FrameConfig,
    registry: Registry,
    progress: Callable[[str], None] = lambda stage: None,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> Engine:
    """Builds and starts an engine at once; arguments and errors are those of `EngineStart`."""
    return EngineStart(config, registry, Workers, progress, vocabulary).finish()
