"""The engines of a server whose number may change while it serves.

Engines of another number are other processes. They load their libraries and check their configuration beside those that
serve; then these end after a common step and give their devices back, and the requests of clients go on with the new
ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineDeadError
from frame.core.plugin_host.registry import Registry
from frame.core.processes.child import STOP_SECONDS
from frame.core.processes.child_process import describe
from frame.core.processes.messages import EngineDown, EngineNews, Engines, EngineUp
from frame.core.processes.shared_fate import OwnFate
from frame.core.processes.supervisor import EngineSupervisor, News

from .engine_set import EngineSet
from .sizes import refusal, resized

logger = logging.getLogger("frame.server")


class ElasticEngines:
    """The engines of this machine. `news` is awaited for every stage, start and death, and for a new number of them."""

    def __init__(self, config: FrameConfig, news: News, command: Sequence[str] | None = None) -> None:
        self._given, self._news, self._command = config, news, command
        self._present = self._next = EngineSet(config, self._tell, command)
        self._choices: Sequence[Any] = ()
        self._scaling: asyncio.Task[None] | None = None
        self._ups: dict[int, EngineUp] | None = None  # kept back until all engines of another number are ready
        self._max_model_len = 0

    @property
    def config(self) -> FrameConfig:
        """The configuration with the weights that engines serve by now, and with their present number."""
        return self._present.config

    @property
    def fate(self) -> OwnFate:
        """What joins the ends of the present engines."""
        return self._present.fate

    @property
    def supervisors(self) -> dict[int, EngineSupervisor]:
        """Those of the present engines, by rank."""
        return self._present.supervisors

    async def start(self) -> None:
        """Starts all engines at once and returns when they are ready; raises `EngineDeadError` and leaves none."""
        self._choices = Registry.load().choices(self._given)
        infos = await self._present.start(self._choices)
        self._max_model_len = min(info.max_model_len for info in infos)

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` of each says why)."""
        waited = None
        while waited is not self._present:
            waited = self._present
            await waited.wait()
            if self._scaling is not None:  # others may follow
                await asyncio.wait([self._scaling])

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all engine processes, by force after `seconds`. May be called twice."""
        if self._scaling is not None:
            self._scaling.cancel()
            await asyncio.wait([self._scaling])
        await self._present.stop(seconds)
        await self._next.stop(0)

    async def scale(self, size: int) -> bool:
        """Serves with `size` engines from now on, also when the caller is cancelled; False where they are so many.

        Raises `ValueError` for a number that is impossible and `RuntimeError` while another one is being reached,
        before anything stops; `EngineDeadError` when the new engines did not start, and then the old number serves, and
        when `stop` ends all meanwhile.
        """
        if reason := refusal(self._given, size):
            raise ValueError(reason)
        if self._scaling is not None:
            raise RuntimeError("the number of engines is being changed already; ask again when that has ended")
        if size == len(self.supervisors):
            return False
        self._scaling = scaling = asyncio.create_task(self._scale(size))
        scaling.add_done_callback(self._ended)
        await asyncio.wait([scaling])  # which goes on when the caller is cancelled
        if scaling.cancelled():
            raise EngineDeadError("the engine was shut down")
        scaling.result()
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._scaling = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s", describe(error))

    def _of(self, size: int) -> FrameConfig:
        """The configuration of so many engines, which serve the present weights and requests of the same length."""
        now = self._present.config
        model = now.model.model_copy(update={"max_model_len": self._max_model_len})
        return resized(self._given.model_copy(update={"model": model, "load": now.load}), size)

    async def _scale(self, size: int) -> None:
        before = self._present
        number = len(before.supervisors)
        logger.info("starting processes for %d engines instead of %d", size, number)
        try:
            config = await self._prepare(size)
        except ValueError as error:
            raise ValueError(f"new_data_parallel_size {size}: {error}") from None
        except EngineDeadError as error:
            raise EngineDeadError(f"{number} engines serve on, since {size} did not start: {error}") from None
        begun = time.monotonic()
        await before.rest()
        await before.stop()
        await self._news(Engines(size, f"the number of engines changes from {number} to {size}"))
        try:
            if self._of(size) != config:  # other weights have come since then
                await self._renew(size)
            await self._begin()
        except Exception as error:
            cause = describe(error)
            await self._next.stop(0)
            await self._news(Engines(number, f"the number of engines is {number} again, since {size} failed: {cause}"))
            await self._begin_again(number, cause)
            raise EngineDeadError(f"{number} engines serve on, since {size} did not start: {cause}") from None
        logger.info("%d engines serve; requests had to wait %.1f s", size, time.monotonic() - begun)

    async def _prepare(self, size: int) -> FrameConfig:
        """Has processes for so many engines wait, once more when other weights come meanwhile; what they have read."""
        while True:
            config = self._of(size)
            await self._renew(size)
            await self._next.prepare(self._choices)
            if self._of(size) == config:
                return config

    async def _renew(self, size: int) -> None:
        if self._next is not self._present:
            await self._next.stop(0)
        self._next = EngineSet(self._of(size), self._tell, self._command)

    async def _begin(self) -> None:
        """Starts the next engines; clients learn of them when all are ready and can take every request that runs."""
        self._ups = {}
        try:
            infos = await self._next.start(self._choices)
            if (longest := min(info.max_model_len for info in infos)) < self._max_model_len:
                raise EngineDeadError(
                    f"they have room for requests of {longest} tokens, and there may be some of {self._max_model_len}; "
                    f"a server with max_model_len {longest} could be scaled so"
                )
            ups = self._ups.values()
        finally:
            self._ups = None
        self._present = self._next
        for up in ups:
            await self._news(up)

    async def _begin_again(self, size: int, cause: str) -> None:
        """Starts as many as there were; when they fail too often, says that there is no engine any more, and raises."""
        for left in reversed(range(self._given.server.max_engine_restarts + 1)):
            await self._renew(size)
            try:
                await self._begin()
                return
            except Exception as error:
                end = f"{size} engines do not start again: {describe(error)}; others were to take their place: {cause}"
                logger.error("%s", end)
                if not left:
                    for rank in range(size):
                        await self._news(EngineDown(end, True, rank))
                    raise EngineDeadError(end) from None

    async def _tell(self, message: EngineNews) -> None:
        if self._ups is not None and isinstance(message, EngineUp):
            self._ups[message.rank] = message
        else:
            await self._news(message)
