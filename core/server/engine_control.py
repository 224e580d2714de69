"""The engine's state, statistics and control methods for endpoints. Knows no route."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from ..interfaces.client import EngineDeadError, EngineInfo
from ..interfaces.engine import EngineStats
from ..interfaces.errors import RequestError

if TYPE_CHECKING:
    from .serving import ServingHost

_STATS_SECONDS = 2.0


class ClientControl:
    """`EngineControl` of a host, over its engine client."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host
        self._stats = EngineStats()

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""
        return self._host.error

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """Calls a control method of the engine, or of the server ("shutdown"); raises `RequestError` with its error."""
        if method == "shutdown":
            await self._host.shut_down()
            return None
        try:
            return await self._host.client.call(method, arguments)
        except EngineDeadError as error:
            raise RequestError(503, str(error)) from None
        except RuntimeError as error:
            raise RequestError(409, str(error)) from None

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine; the last known values while it restarts or is too busy."""
        with contextlib.suppress(EngineDeadError, TimeoutError):
            self._stats = await asyncio.wait_for(self._host.client.stats(), _STATS_SECONDS)
        return self._stats

    @property
    def info(self) -> EngineInfo | None:
        """Facts of the engine; None before the first one was ready."""
        return self._host.client.known_info
