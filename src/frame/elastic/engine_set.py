"""The engines that this machine starts, as one: each alone, or those that share experts together. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineDeadError, EngineInfo
from frame.core.processes.child import STOP_SECONDS
from frame.core.processes.supervisor import EngineSupervisor, News

from .distant_fate import fate_of


class EngineSet:
    """The supervisors of the engines of one configuration, from their start to their end."""

    def __init__(self, config: FrameConfig, news: News, command: Sequence[str] | None = None) -> None:
        parallel = config.data_parallel
        ranks = parallel.local_ranks
        self._config, self._several = config, len(ranks) > 1 or bool(parallel.remote_ranks)
        self.fate = fate = fate_of(config)
        self.supervisors = {rank: EngineSupervisor(config, news, command, rank, fate) for rank in ranks}
        for one in self.supervisors.values():
            fate.add(one)

    @property
    def config(self) -> FrameConfig:
        """The configuration with the weights that engines serve by now."""
        newest = next(iter(self.supervisors.values())).config
        return self._config.model_copy(update={"model": newest.model, "load": newest.load})

    async def prepare(self, choices: Sequence[Any]) -> None:
        """Starts processes that wait with all but the devices; raises `ValueError` with what is wrong for them.

        Then, as after `EngineDeadError`, none is left. The first one is prepared alone: it finds what is impossible.
        """
        limit, members = self._config.server.ready_seconds, list(self.supervisors.values())
        try:
            for part in (members[:1], members[1:]):
                async with asyncio.timeout(limit):
                    await self._all(part, lambda one: one.prepare(choices))
        except TimeoutError:
            text = f"engine processes did not load their libraries within {limit:g} seconds (ready_seconds)"
            raise EngineDeadError(text) from None

    async def start(self, choices: Sequence[Any]) -> list[EngineInfo]:
        """Starts all at once and returns when they are ready; raises `EngineDeadError` and leaves none."""
        return await self._all(list(self.supervisors.values()), lambda one: one.start(choices))

    async def rest(self) -> None:
        """Has all hold their requests back; returns when none is in a step, or will not end it soon."""
        await asyncio.gather(*(one.rest() for one in self.supervisors.values()))

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` of each says why)."""
        await asyncio.gather(*(one.wait() for one in self.supervisors.values()))

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all engine processes, by force after `seconds`. May be called twice."""
        await asyncio.gather(*(one.stop(seconds) for one in self.supervisors.values()))
        self.fate.close()

    async def _all(
        self, members: Sequence[EngineSupervisor], work: Callable[[EngineSupervisor], Awaitable[Any]]
    ) -> list[Any]:
        """What the work of these members returns; when one fails, ends all and names it."""
        tasks = [asyncio.ensure_future(work(one)) for one in members]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop(0)
            if isinstance(error, EngineDeadError) and self._several:
                for one, task in zip(members, tasks, strict=True):
                    if not task.cancelled() and task.exception() is error:
                        raise EngineDeadError(f"engine {one.rank}: {error}") from None
            raise
