"""Makes workers for executors: in this process, in a child process, or from a recipe in any other process."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from frame.links.early_workers import EarlyWorkers

from ..config.checkpoint import read_checkpoint
from ..config.tree import FrameConfig
from ..interfaces.executor import SpawnedTeam, SpawnedWorker, WorkerProtocol
from ..interfaces.mesh import Placement
from ..interfaces.wire import decode, encode
from ..plugin_host.model_choice import choose_model
from ..plugin_host.registry import Registry
from ..startup.early import begin_platforms
from ..startup.logging import configure_logging

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger("frame.start")


class Workers:
    """Implements `frame.interfaces.WorkerFactory` for one engine. `progress` hears each stage of a worker's start.

    Workers that it spawns have the processes of `begun`, as long as there are any.
    """

    def __init__(
        self,
        config: FrameConfig,
        registry: Registry,
        progress: Callable[[str], None],
        engine_id: str = "",
        begun: EarlyWorkers | None = None,
    ) -> None:
        self._begun = begun or EarlyWorkers(0)
        self._config = config
        self._registry = registry
        self._progress = progress
        self._engine_id = engine_id

    def local(self, placement: Placement) -> WorkerProtocol:
        """A worker in the calling process."""
        from .worker import Worker

        return Worker(self._config, self._registry, placement, self._engine_id, self._progress)

    def spawn(self, placement: Placement) -> SpawnedWorker:
        """A worker in a process of its own, which loads exactly the plugins that this one chose."""
        from .worker_process import RemoteWorker

        return RemoteWorker(self.recipe(placement), self._progress, self._begun.take())

    def join(self, workers: Sequence[SpawnedWorker]) -> SpawnedTeam:
        """The workers of one engine, told everything together."""
        from .worker_team import WorkerTeam

        return WorkerTeam(workers)

    def connected(self, connection: socket.socket, where: str) -> SpawnedWorker:
        """A worker whose process is on another machine."""
        from .connected import ConnectedWorker

        return ConnectedWorker(connection, where, self._progress)

    def recipe(self, placement: Placement) -> bytes:
        """JSON from which `worker_of` makes this worker elsewhere; raises `ConfigError` for what JSON cannot hold."""
        parts = {
            "config": self._config.to_plain(),
            "plugins": [list(choice) for choice in self._registry.choices(self._config)],
            "placement": encode(placement).hex(),
            "engine_id": self._engine_id,
        }
        return json.dumps(parts).encode()


class Libraries:
    """What a worker's process loads before anything else: logging as `config` says, plugins, and torch."""

    def __init__(self, config: FrameConfig, plugins: list[Any]) -> None:
        configure_logging(config.server.log_level)
        self.plugins, self.registry = plugins, Registry.load(only=plugins)
        begin_platforms(config, self.registry)
        from . import worker  # noqa: F401

    @classmethod
    def of(cls, outline: bytes) -> Libraries | None:
        """Those of a process whose recipe comes later, and its model's; None where that fails: the recipe will, too."""
        try:
            parts = json.loads(outline)
            config = FrameConfig.model_validate(parts["config"])
            found = cls(config, parts["plugins"])
            choose_model(read_checkpoint(config), found.registry)  # imports it
        except Exception as error:
            logger.debug("a worker loaded nothing early: %s", error, exc_info=error)
            return None
        return found


def worker_of(
    recipe: bytes, progress: Callable[[str], None] = lambda stage: None, begun: Libraries | None = None
) -> Worker:
    """The worker of a recipe, for a process that does nothing else. What it has `begun` with is not loaded again."""
    parts = json.loads(recipe)
    config = FrameConfig.model_validate(parts["config"])
    if begun is None or begun.plugins != parts["plugins"]:
        begun = Libraries(config, parts["plugins"])
    from .worker import Worker

    placement = decode(bytes.fromhex(parts["placement"]), Placement)
    return Worker(config, begun.registry, placement, parts["engine_id"], progress)
