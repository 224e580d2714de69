"""A machine that starts engines for a server elsewhere: `frame serve --headless`. Imports no torch.

It keeps a connection to the server and says there how its engines are; the server's clients connect to the engines
themselves. When the server dies, the engines stay, and the next server gets them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineDeadError
from frame.core.processes.channel import AsyncChannel
from frame.core.processes.child_process import describe
from frame.core.processes.messages import (
    Admitted,
    Dismissed,
    EngineDown,
    EngineNews,
    Engines,
    EngineUp,
    Failed,
    MachineOrder,
    Refused,
    Stage,
)
from frame.elastic.distant_fate import DistantFate
from frame.elastic.supervisor import DataParallelSupervisor

from .description import described, listed
from .fate_messages import FateNews, FateOrder
from .greeting import RefusedError, connect_async
from .machines import MAX_NEWS_BYTES

logger = logging.getLogger("frame.server")

#: Seconds between two attempts to reach the server.
RETRY_SECONDS = 0.5


class Headless:
    """One machine from its first connection to the server to the end of its engines."""

    def __init__(self, config: FrameConfig, command: Sequence[str] | None = None) -> None:
        self._config, self._command = config, command
        parallel = config.data_parallel
        self._host, self._port = parallel.data_parallel_address, parallel.data_parallel_rpc_port
        self._channel: AsyncChannel | None = None
        self._supervisor: DataParallelSupervisor | None = None
        self._fate: DistantFate | None = None
        self._states: dict[int, EngineNews] = {}  # the last of each engine, for the next server

    async def run(self) -> int:
        """Returns the exit status."""
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        parts = [asyncio.create_task(part) for part in (_named(self._serve()), _named(_wait(stopped)))]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            cause = next(iter(done)).result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            if self._supervisor is not None:
                await self._supervisor.stop()
        if cause:
            logger.error("%s", cause)
        return 1 if cause else 0

    async def _serve(self) -> str:
        """Follows the server, and starts the engines once it has let this machine in; returns why it ends, or ""."""
        self._channel, own = await self._reach()
        parallel = self._config.data_parallel.model_copy(update={"data_parallel_own_address": own})
        config = self._config.model_copy(update={"data_parallel": parallel})
        self._supervisor = DataParallelSupervisor(config, self._news, self._command)
        if isinstance(fate := self._supervisor.engines.fate, DistantFate):
            self._fate, fate.send = fate, self._tell
        parts = [asyncio.create_task(part) for part in (_named(self._follow()), _named(self._run(self._supervisor)))]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            if self._channel is not None:
                self._channel.close()

    async def _run(self, supervisor: DataParallelSupervisor) -> str:
        """Keeps the engines alive; tells the server why there are none any more."""
        try:
            await supervisor.start()
            await supervisor.wait()
            downs = [one for one in self._states.values() if isinstance(one, EngineDown)]
            cause = "; ".join(f"engine {one.rank}: {one.error}" for one in downs)
        except EngineDeadError as error:
            cause = str(error)
        await self._tell(Failed(cause))
        return cause

    async def _follow(self) -> str:
        """Returns "" when the server dismisses this machine; goes on with the next server when one dies."""
        while self._channel is not None:
            with contextlib.suppress(OSError, ValueError):
                while (order := await self._channel.receive()) is not None:
                    if isinstance(order, Dismissed):
                        logger.info("the server has ended")
                        return ""
                    if self._fate is not None and isinstance(order, FateOrder):
                        await self._fate.obey(order)
            self._channel.close()
            self._channel = None
            if self._fate is not None:
                return f"the server at {self._host}:{self._port} is gone, whose engines share experts with those here"
            logger.warning("the server at %s:%d is gone; waiting for the next one", self._host, self._port)
            channel, _ = await self._reach()
            self._channel = channel
            for rank in list(self._states):
                await _send(channel, self._states[rank])
        return ""

    async def _reach(self) -> tuple[AsyncChannel, str]:
        """A connection to the server that has let this machine in, and this machine's own address.

        Raises `RefusedError` when it does not, `TimeoutError` when it cannot be reached for too long.
        """
        seconds, own = self._config.server.ready_seconds, self._config.data_parallel.data_parallel_own_address
        config = self._config if self._supervisor is None else self._supervisor.config
        said, key = await asyncio.to_thread(described, config), self._config.data_parallel.key()
        latest, before = time.monotonic() + seconds, ""
        while True:
            try:
                connection = await connect_async(self._host, self._port, key, said, own=own)
                address = connection.getsockname()[0]
                channel = await AsyncChannel.wrap(connection, MachineOrder, MAX_NEWS_BYTES)
                order = await channel.receive()
                if isinstance(order, Admitted):
                    logger.info("the server at %s:%d has let this machine in", self._host, self._port)
                    return channel, address
                channel.close()
                if isinstance(order, Refused) and not order.later:
                    raise RefusedError(f"the server refuses this machine: {order.reason}")
                reason = order.reason if isinstance(order, Refused) else "it has closed the connection"
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error) or "it does not answer"
            if time.monotonic() > latest:
                raise TimeoutError(
                    f"the server at {self._host}:{self._port} did not let this machine in within {seconds:g} seconds "
                    f"(ready_seconds): {reason}"
                )
            if reason != before:
                logger.info("waiting for the server at %s:%d: %s", self._host, self._port, reason)
                before = reason
            await asyncio.sleep(RETRY_SECONDS)

    async def _news(self, message: EngineNews) -> None:
        if isinstance(message, Engines):
            return  # never: other machines' engines are as many as the server was started for
        if isinstance(message, Stage):
            logger.info("engine %d: %s", message.rank, message.name)
        else:
            self._states[message.rank] = message
            logger.info("engine %d: %s", message.rank, "ready" if isinstance(message, EngineUp) else message.error)
        await self._tell(message)

    async def _tell(self, message: EngineNews | Failed | FateNews) -> None:
        if self._channel is not None:
            await _send(self._channel, message)


async def _send(channel: AsyncChannel, message: Any) -> None:
    with contextlib.suppress(OSError):  # the server is gone; the next one is told
        await channel.send(message)


async def _wait(event: asyncio.Event) -> str:
    await event.wait()
    return ""


async def _named(part: Coroutine[Any, Any, str]) -> str:
    """What a part returns, or why it failed."""
    try:
        return await part
    except Exception as error:
        return describe(error)


def serve_headless(config: FrameConfig, command: Sequence[str] | None = None) -> int:
    """Starts this machine's engines for a server elsewhere; returns the exit status."""
    ranks = list(config.data_parallel.local_ranks)
    logger.info("%s of %d for a server elsewhere", listed(ranks), config.data_parallel.data_parallel_size)
    return asyncio.run(Headless(config, command).run())
