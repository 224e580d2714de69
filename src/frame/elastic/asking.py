"""How an API process asks its parent for another number of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from frame.core.interfaces.client import EngineDeadError
from frame.core.processes.channel import AsyncChannel
from frame.core.processes.child_process import describe
from frame.core.processes.messages import Scale, Scaled


async def answer(scaling: Awaitable[bool]) -> Scaled:
    """What `ElasticEngines.scale` does, as the answer to the process that asked for it."""
    try:
        return Scaled(await scaling)
    except ValueError as error:
        return Scaled(error=describe(error), fault="request")
    except EngineDeadError as error:
        return Scaled(error=describe(error))
    except RuntimeError as error:
        return Scaled(error=describe(error), fault="load")


class ScaleAsking:
    """The asking side, for one question at a time."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[Scaled] | None = None

    def to(self, parent: AsyncChannel) -> Callable[[int], Awaitable[bool]]:
        """The function that asks over this channel; it raises what `ElasticEngines.scale` raises in the parent."""

        async def ask(size: int) -> bool:
            waiting: asyncio.Future[Scaled] = asyncio.get_running_loop().create_future()
            self._waiting = waiting
            await parent.send(Scale(size))
            found = await waiting
            if found.error:
                kinds = {"request": ValueError, "load": RuntimeError}
                raise kinds.get(found.fault, EngineDeadError)(found.error)
            return found.changed

        return ask

    def answered(self, answer: Scaled) -> None:
        """Called with what the parent says."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(answer)
