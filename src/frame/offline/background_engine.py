"""An engine process whose client runs on a thread of its own, so that callers need no event loop to use it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineClient, EngineInfo
from frame.core.interfaces.engine import EngineOutput, EngineRequest, EngineStats
from frame.ranks.client import start_engine

T = TypeVar("T")


class BackgroundEngine:
    """Implements `frame.interfaces.EngineClient` for callers of any event loop.

    Building it starts the engine process and waits until it is ready; raises the cause when it does not become ready.
    `stop` works without a loop.
    """

    def __init__(self, config: FrameConfig) -> None:
        self._stopped = asyncio.Event()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="frame-engine-client", daemon=True
        )
        self._thread.start()
        self._loop = started.result()
        self._client: EngineClient | None = None
        try:
            self._client = self._submit(start_engine(config)).result()
        except BaseException:
            self.stop()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._running().info

    @property
    def error(self) -> str | None:
        return "the engine was shut down" if self._client is None else self._client.error

    async def add(self, request: EngineRequest) -> None:
        await asyncio.wrap_future(self._submit(self._running().add(request)))

    async def abort(self, request_ids: Iterable[str]) -> None:
        if self._client is not None:
            await asyncio.wrap_future(self._submit(self._client.abort(list(request_ids))))

    async def outputs(self) -> AsyncIterator[list[EngineOutput]]:
        queue: asyncio.Queue[list[EngineOutput] | None] = asyncio.Queue()
        pump = self._submit(_pump(self._running(), queue, asyncio.get_running_loop()))
        try:
            while (batch := await queue.get()) is not None:
                yield batch
        finally:
            pump.cancel()

    async def stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._submit(self._running().stats()))

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        return await asyncio.wrap_future(self._submit(self._running().call(method, arguments)))

    async def close(self) -> None:
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Ends the engine process and the thread; returns when both are gone. May be called twice."""
        if threading.current_thread() is self._thread:  # the garbage collector may run anywhere
            threading.Thread(target=self.stop, name="frame-engine-stop").start()
            return
        client, self._client = self._client, None
        if client is not None:
            self._submit(client.close()).result()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    async def _run(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stopped.wait()

    def _running(self) -> EngineClient:
        if self._client is None:
            raise RuntimeError("the engine was shut down")
        return self._client

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _pump(
    client: EngineClient, queue: asyncio.Queue[list[EngineOutput] | None], loop: asyncio.AbstractEventLoop
) -> None:
    """Passes outputs from the client's event loop to the consumer's."""
    try:
        async for batch in client.outputs():
            loop.call_soon_threadsafe(queue.put_nowait, batch)
        loop.call_soon_threadsafe(queue.put_nowait, None)
    except RuntimeError:
        if not loop.is_closed():
            raise
