"""What engines emitted and their consumer has not read yet; steps that wait for it come as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..interfaces.engine import EngineOutput


class OutputQueue:
    """For one consumer of one event loop. Outputs of requests that were lost are never mixed with others."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[EngineOutput] | None] = asyncio.Queue()
        self._newest: list[EngineOutput] | None = None  # the last batch in the queue; grows until it is read

    def put(self, outputs: list[EngineOutput]) -> None:
        """Adds what a step emitted, in order."""
        if self._newest is not None:
            self._newest += outputs
        else:
            self._newest = outputs
            self._queue.put_nowait(outputs)

    def put_apart(self, outputs: list[EngineOutput]) -> None:
        """Adds outputs as a batch of their own."""
        self._newest = None
        self._queue.put_nowait(outputs)

    def close(self) -> None:
        """Ends `read` after all that was put before."""
        self._queue.put_nowait(None)

    async def read(self) -> AsyncIterator[list[EngineOutput]]:
        """Yields batches until `close`."""
        while (batch := await self._queue.get()) is not None:
            if batch is self._newest:
                self._newest = None
            yield batch
