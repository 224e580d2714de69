"""Makes workers for executors: in this process, or in one of their own."""

from __future__ import annotations

from collections.abc import Callable

from ..config.tree import FrameConfig
from ..interfaces.executor import WorkerProtocol
from ..plugin_host.registry import Registry


class Workers:
    """Implements `frame.interfaces.WorkerFactory` for one engine. `progress` hears each stage of a worker's start."""

    def __init__(self, config: FrameConfig, registry: Registry, progress: Callable[[str], None]) -> None:
        self._config = config
        self._registry = registry
        self._progress = progress

    def local(self, rank: int) -> WorkerProtocol:
        """A worker in the calling process."""
        from .worker import Worker

        return Worker(self._config, self._registry, rank, self._progress)

    def spawn(self, rank: int) -> WorkerProtocol:
        """A worker in a process of its own, which loads exactly the plugins that this one chose."""
        from .worker_process import RemoteWorker

        return RemoteWorker(self._config, self._registry.choices(self._config), rank, self._progress)
