"""All engines of a server as one: those of this machine, and those that other machines start for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from frame.core.config.tree import FrameConfig
from frame.core.processes.child import STOP_SECONDS
from frame.core.processes.shared_fate import SharedFate
from frame.core.processes.supervisor import News
from frame.links.machines import Machines

from .distant_fate import DistantMembers
from .engines import ElasticEngines


class DataParallelSupervisor:
    """Keeps the engines of this machine alive: each by itself, or those that share experts together.

    `news` is awaited for every stage, start and death, also of engines that other machines start for this server.
    """

    def __init__(self, config: FrameConfig, news: News, command: Sequence[str] | None = None) -> None:
        self.engines = ElasticEngines(config, news, command)
        self._machines: Machines | None = None
        if config.data_parallel.remote_ranks:
            self._machines = machines = Machines(config, news, lambda: self.config)
            if isinstance(fate := self.engines.fate, SharedFate):
                machines.shared = DistantMembers(fate, config.data_parallel.remote_ranks, machines.order)

    @property
    def config(self) -> FrameConfig:
        """The configuration with the weights that engines serve by now, and with their present number."""
        return self.engines.config

    async def start(self) -> None:
        """Starts all engines at once and returns when they are ready; raises `EngineDeadError` and leaves none.

        Raises `ValueError` where it cannot listen for other machines.
        """
        if self._machines is not None:
            self._machines.listen()
        parts = [self.engines.start()] if self._machines is None else [self._start_here(), self._machines.start()]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop(0)
            raise

    async def _start_here(self) -> None:
        """As `engines.start`; engines that share experts with those of other machines start when these have come."""
        if self._machines is not None and self._machines.shared.joined:
            await self._machines.come()
        await self.engines.start()

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` of each says why)."""
        await self.engines.wait()
        if self._machines is not None:
            await self._machines.wait()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all engine processes, by force after `seconds`. May be called twice."""
        if self._machines is not None:
            await self._machines.stop()
        await self.engines.stop(seconds)
