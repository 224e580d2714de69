"""Makes workers for executors: in this process, in a child process, or from a recipe in any other process."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..config.tree import FrameConfig
from ..interfaces.executor import SpawnedTeam, SpawnedWorker, WorkerProtocol
from ..interfaces.mesh import Placement
from ..interfaces.wire import decode, encode
from ..plugin_host.registry import Registry
from ..startup.early import begin_platforms
from ..startup.logging import configure_logging

if TYPE_CHECKING:
    from .worker import Worker


class Workers:
    """Implements `frame.interfaces.WorkerFactory` for one engine. `progress` hears each stage of a worker's start."""

    def __init__(
        self, config: FrameConfig, registry: Registry, progress: Callable[[str], None], engine_id: str = ""
    ) -> None:
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

        return RemoteWorker(self.recipe(placement), self._progress)

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


def worker_of(recipe: bytes, progress: Callable[[str], None] = lambda stage: None) -> Worker:
    """The worker of a recipe, for a process that does nothing else: it sets up logging and loads the plugins."""
    parts = json.loads(recipe)
    config = FrameConfig.model_validate(parts["config"])
    configure_logging(config.server.log_level)
    registry = Registry.load(only=parts["plugins"])
    begin_platforms(config, registry)
    from .worker import Worker

    placement = decode(bytes.fromhex(parts["placement"]), Placement)
    return Worker(config, registry, placement, parts["engine_id"], progress)
