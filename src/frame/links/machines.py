"""The engines of a server that other machines start: who may offer them, and which of them serve.

Each machine is a `frame serve --headless`, which keeps a connection to the server as long as it has engines. What it
says of them reaches the clients here as news of engines here do. Knows no request: clients talk to engines themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineDeadError
from frame.core.processes.channel import AsyncChannel
from frame.core.processes.messages import (
    Admitted,
    Dismissed,
    EngineDown,
    EngineNews,
    EngineUp,
    Failed,
    MachineNews,
    Refused,
)

from .description import described, listed
from .fate_messages import FateNews, FateOrder
from .greeting import Listener
from .members import NoMembers
from .versions import differences

logger = logging.getLogger("frame.server")

#: Largest message about engines.
MAX_NEWS_BYTES = 1 << 20


class Machines:
    """Waits for the machines that start the engines `remote_ranks`, and passes what they say to `news`.

    `current` is the configuration of the engines here, whose weights may have been replaced.
    """

    def __init__(
        self, config: FrameConfig, news: Callable[[EngineNews], Awaitable[None]], current: Callable[[], FrameConfig]
    ) -> None:
        self._parallel, self._seconds = config.data_parallel, config.server.ready_seconds
        self._news, self._current = news, current
        self.shared = NoMembers()  # of engines that share experts, all of which end when a machine goes
        self._left: str | None = None  # how a machine went
        self._ranks = self._parallel.remote_ranks
        self._channels: dict[int, AsyncChannel] = {}  # rank → its machine
        self._places: dict[int, str] = {}  # rank → address of its machine
        self._serving: set[int] = set()
        self._starting = set(self._ranks)  # those that were never ready
        self._changed = asyncio.Event()
        self._listener: Listener | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Lets machines come; raises `ValueError` where it cannot listen."""
        loop = asyncio.get_running_loop()

        def greeted(connection: socket.socket, said: dict[str, Any]) -> None:
            try:
                loop.call_soon_threadsafe(self._begin, connection, said)
            except RuntimeError:  # the loop has ended
                connection.close()

        host, port = self._parallel.data_parallel_address, self._parallel.data_parallel_rpc_port
        remedy = "choose another --data-parallel-rpc-port or --data-parallel-address, on all machines"
        self._listener = Listener(host, port, self._parallel.key(), remedy, greeted)
        logger.info("waiting for %s of other machines at %s:%d", listed(self._ranks), host, port)

    async def start(self) -> None:
        """Returns when all engines were ready; raises `EngineDeadError` that names those for which nobody comes."""
        latest = time.monotonic() + self._seconds
        while self._starting:
            if self.shared.joined and self._left is not None:
                raise EngineDeadError(self._left)
            absent, left = sorted(self._starting - self._channels.keys()), latest - time.monotonic()
            if absent and left <= 0:
                raise EngineDeadError(
                    f"no machine came to {self._parallel.data_parallel_address}:{self._parallel.data_parallel_rpc_port}"
                    f" with {listed(absent)} of {self._parallel.data_parallel_size} within {self._seconds:g} seconds "
                    f"(ready_seconds); start it with --headless --data-parallel-start-rank {absent[0]}"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if absent else None):
                    await self._changed.wait()
            if not absent:  # a machine that has come and gone gets the time again
                latest = time.monotonic() + self._seconds

    async def come(self) -> None:
        """Returns when there is a machine for every engine."""
        while self._channels.keys() < set(self._ranks):
            self._changed.clear()
            await self._changed.wait()

    async def order(self, rank: int, order: FateOrder) -> None:
        """Tells the machine of an engine what becomes of it, if it is there."""
        if (channel := self._channels.get(rank)) is not None:
            await _send(channel, order)

    async def wait(self) -> None:
        """Returns when no other machine has engines."""
        while self._channels:
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """Lets nobody in any more, and dismisses the machines. May be called twice."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for channel in set(self._channels.values()):
            await _send(channel, Dismissed())
        for task in self._conversations:
            task.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    def _begin(self, connection: socket.socket, said: dict[str, Any]) -> None:
        if self._listener is None:
            connection.close()
            return
        task = asyncio.create_task(self._converse(connection, said))
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)

    async def _converse(self, connection: socket.socket, said: dict[str, Any]) -> None:
        """Follows a machine from its greeting until it is gone."""
        place = connection.getpeername()[0]
        channel = await AsyncChannel.wrap(connection, MachineNews, MAX_NEWS_BYTES)
        try:
            here = await asyncio.to_thread(described, self._current())
            if (refused := self._refusal(here, said, place)) is not None:
                logger.error("a machine at %s is refused: %s", place, refused.reason)
                await _send(channel, refused)
                return
            ranks = said["ranks"]
            for rank in ranks:
                self._channels[rank], self._places[rank] = channel, place
            self._changed.set()
            logger.info("%s: a machine at %s starts them", listed(ranks), place)
            try:
                await _send(channel, Admitted())
                cause = await self._follow(channel, ranks)
            finally:
                for rank in ranks:
                    del self._channels[rank]
                self._changed.set()
            self._left = f"the machine at {place} with {listed(ranks)} is gone{cause and f': {cause}'}"
            logger.warning("%s", self._left)
            for rank in self._serving.intersection(ranks):
                self._serving.discard(rank)
                await self._news(
                    EngineDown(f"the machine at {place} is gone{cause and f': {cause}'}", True, rank, True)
                )
            self.shared.lost(ranks, self._left)
        finally:
            channel.close()

    async def _follow(self, channel: AsyncChannel, ranks: Sequence[int]) -> str:
        """Passes on what a machine says of its engines; returns why it left, "" where it does not say."""
        try:
            while (message := await channel.receive()) is not None:
                if isinstance(message, Failed):
                    return message.error
                if message.rank not in ranks:
                    return f"it spoke of engine {message.rank}"
                if isinstance(message, FateNews):
                    await self.shared.news(message)
                    continue
                if isinstance(message, EngineUp):
                    self._serving.add(message.rank)
                    self._starting.discard(message.rank)
                await self._news(message)
                self._changed.set()
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def _refusal(self, here: dict[str, Any], said: dict[str, Any], place: str) -> Refused | None:
        if wrong := differences(here, said, f"the machine at {place}", "the server", "machines"):
            return Refused(wrong)
        ranks = said.get("ranks")
        known = isinstance(ranks, list) and all(type(rank) is int for rank in ranks) and len(ranks) == len({*ranks})
        if not known or not ranks:
            return Refused("it does not say its ranks")
        if wrong_ones := [rank for rank in ranks if rank not in self._ranks]:
            return Refused(f"it starts {listed(wrong_ones)}, and the server waits for {listed(self._ranks)}")
        if taken := [rank for rank in ranks if rank in self._channels]:
            return Refused(f"{listed(taken)} came from {self._places[taken[0]]} already", later=True)
        return None


async def _send(channel: AsyncChannel, message: Any) -> None:
    with contextlib.suppress(OSError):  # it is gone, as reading from it says, too
        await channel.send(message)
