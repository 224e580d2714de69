"""Carries the engine's outputs to the consumer of each request in an asyncio front.

Requests of an engine that died continue on the next one from the last token that their stream received. Only one event
loop may use it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from ..interfaces.client import EngineClient, EngineDeadError
from ..interfaces.engine import EngineOutput, Fault
from .front import Front
from .outputs import RequestOutput

logger = logging.getLogger(__name__)


class Collector:
    """Holds at most one output of a request until its consumer takes it.

    A consumer that is slower than the engine gets the tokens of several steps in one output: `aggregate` joins deltas,
    otherwise a newer output replaces the older one.
    """

    def __init__(self, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; never blocks."""
        if self._output is None:
            self._output = output
        else:
            self._output.add(output, self._aggregate)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Makes `get` raise `error` after it has returned the output that is waiting."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output; waits for it."""
        if self._output is None and self._error is None:
            if self._waiter is not None:
                raise RuntimeError("a request's outputs were taken by two consumers")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._output = self._output, None
        if output is not None:
            return output
        raise self._error or RuntimeError("a request's outputs were taken by two consumers")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestStreams:
    """The collectors of all requests. Reading the engine's outputs begins with the first request."""

    def __init__(self, front: Front, client: EngineClient) -> None:
        self._front = front
        self._client = client
        self._collectors: dict[str, Collector] = {}
        self._reader: asyncio.Task[None] | None = None
        self._replays: set[asyncio.Task[None]] = set()
        #: requests that were continued on another engine
        self.num_replayed = 0

    def start(self) -> None:
        """Starts to read the engine's outputs unless that has begun."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(self._read())

    def open(self, request_id: str, aggregate: bool) -> Collector:
        """Makes the collector that gets the outputs of an admitted request; `aggregate` as for `Collector`."""
        collector = self._collectors[request_id] = Collector(aggregate)
        return collector

    async def leave(self, request_id: str, finished: bool) -> None:
        """Forgets the consumer of a request, which is aborted unless it is `finished`."""
        self._collectors.pop(request_id, None)
        if not finished:
            await self.end([request_id])

    async def end(self, request_ids: Iterable[str]) -> None:
        """Ends requests as aborted; unknown ids are ignored."""
        outputs, ended = self._front.abort(request_ids)
        self._deliver(outputs)
        if ended:
            with suppress(EngineDeadError):
                await self._client.abort(ended)

    def close(self) -> None:
        """Ends every stream as aborted, without telling the engine, and reads no more."""
        outputs, _ = self._front.abort(list(self._collectors))
        self._deliver(outputs)
        if self._reader is not None:
            with suppress(RuntimeError):  # its loop may be closed
                self._reader.cancel()

    async def _read(self) -> None:
        """Turns engine outputs into request outputs until the client is closed."""
        error: Exception = EngineDeadError("the engine's client was closed")
        try:
            async for batch in self._client.outputs():
                if batch and batch[0].fault == "lost":
                    self._replay([output.request_id for output in batch])
                    continue
                await self._take(batch)
        except Exception as cause:
            logger.exception("the text side failed")
            error = EngineDeadError(f"the text side failed: {type(cause).__name__}: {cause}")
        for collector in self._collectors.values():
            collector.fail(error)

    async def _take(self, batch: Iterable[EngineOutput]) -> None:
        outputs, ended = self._front.process(batch)
        self._deliver(outputs)
        if ended:
            await self._client.abort(ended)

    def _replay(self, request_ids: list[str]) -> None:
        """Submits requests to the next engine while other outputs are still read."""
        task = asyncio.get_running_loop().create_task(self._add_again(request_ids))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)

    async def _add_again(self, request_ids: list[str]) -> None:
        for position, request_id in enumerate(request_ids):
            try:
                request = self._front.replay(request_id)
                if request is not None:
                    await self._client.add(request)
                    self.num_replayed += 1
            except (EngineDeadError, ValueError) as error:
                fault: Fault = "engine" if isinstance(error, EngineDeadError) else "request"
                rest = request_ids[position:] if fault == "engine" else [request_id]
                await self._take(
                    EngineOutput(request_id=name, finish_reason="error", error=str(error), fault=fault) for name in rest
                )
                if fault == "engine":
                    return

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                collector.put(output)
