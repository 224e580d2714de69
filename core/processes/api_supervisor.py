"""Starts the API processes of a server, tells them about the engine, and replaces those that die. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from frame.served.news import AdapterNews

from ..config.tree import FrameConfig
from .child import Child, spawn
from .messages import ApiOrder, ApiReport, EngineNews, Engines, Failed, Scale, Scaled, Scaling, Serving, Shutdown, Stage
from .python_command import python_command
from .supervisor import STEADY_SECONDS

#: Called with the models' names when all of them serve, and with the cause when one died.
OnServing = Callable[[Sequence[str] | None, str], None]


class ApiSupervisor:
    """Keeps one API process alive for each listener; their shared counts lie in memory that it opens."""

    def __init__(
        self,
        config: FrameConfig,
        listeners: Sequence[socket.socket],
        on_serving: OnServing,
        *,
        admin: socket.socket | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
        on_scale: Callable[[int], Awaitable[Scaled]],
    ) -> None:
        self._config = config
        self._files = {"--config-file": json.dumps(config.to_plain())}
        self._admin = admin
        self._on_shutdown, self._on_scale = on_shutdown, on_scale
        self._listeners = listeners
        self._on_serving = on_serving
        self._children: dict[int, Child] = {}
        self._serving: set[int] = set()
        self._news: dict[int, list[EngineNews]] = {}  # of each engine: whether it serves, and its present stage
        self._adapters: dict[str, AdapterNews] = {}  # the last news of each, for processes that start later
        self._deaths = 0
        self._draining = False
        self._answering: set[asyncio.Task[None]] = set()
        self._num_scaling = 0  # questions for another number of engines that are not answered yet
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> str | None:
        """Returns None once all have drained, or the cause when one cannot be restarted."""
        shared = {f"--{name}-fd": os.memfd_create(f"frame-{name}") for name in ("metrics", "limits", "ranks")}
        keepers = asyncio.gather(*(self._keep(index, shared) for index in range(len(self._listeners))))
        ends: list[asyncio.Future[Any]] = [keepers, self._failed]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                return self._failed.result()
            await keepers
            return None
        finally:
            keepers.cancel()
            await asyncio.gather(keepers, return_exceptions=True)
            for descriptor in shared.values():
                os.close(descriptor)

    async def tell(self, message: EngineNews) -> None:
        """Passes a message about the engine on, also to processes that start later."""
        if isinstance(message, Engines):
            self._news = {-1: [message]}  # before those of any engine
        else:
            kept = self._news.get(message.rank, [])
            before = [one for one in kept if not isinstance(one, Stage)] if isinstance(message, Stage) else []
            self._news[message.rank] = [*before, message]
        await self._send_all(message)

    def drain(self) -> None:
        """Tells all of them to finish running requests and to end."""
        self._draining = True
        for child in self._children.values():
            child.signal(signal.SIGTERM)

    async def stop(self, seconds: float) -> None:
        """Ends all of them, by force after `seconds`."""
        await asyncio.gather(*(child.stop(seconds) for child in self._children.values()))

    def _fail(self, cause: str) -> None:
        if not self._failed.done():
            self._failed.set_result(cause)

    async def _keep(self, index: int, shared: dict[str, int]) -> None:
        listener = self._listeners[index].fileno()
        arguments = ["--listen-fd", str(listener), "--index", str(index)]
        for option, descriptor in shared.items():
            arguments += [option, str(descriptor)]
        descriptors = [listener, *shared.values()]
        if self._admin is not None and index == 0:  # one process serves the admin listener
            arguments += ["--admin-fd", str(self._admin.fileno())]
            descriptors.append(self._admin.fileno())
        while True:
            born = time.monotonic()
            child = await spawn(python_command("frame", "api"), arguments, ApiReport, descriptors, self._files)
            self._children[index] = child
            if self._draining:
                child.signal(signal.SIGTERM)
            known: list[ApiOrder] = [*self._adapters.values(), *(one for kept in self._news.values() for one in kept)]
            if self._num_scaling:  # before it hears of an engine that it could call
                known.insert(0, Scaling(under_way=True))
            await _send(child, *known)  # before any later news
            served = await self._follow(index, child)
            death = await child.death()
            self._serving.discard(index)
            if self._draining:
                return
            if time.monotonic() - born > STEADY_SECONDS:
                self._deaths = 0  # it had served, so a new row of deaths begins
            self._deaths += 1
            if not served or self._deaths > self._config.server.max_engine_restarts * len(self._listeners):
                self._fail(f"the API process {death}")
                return
            self._on_serving(None, f"the API process {death}")
            if "--successor" not in arguments:
                arguments.append("--successor")

    async def _follow(self, index: int, child: Child) -> bool:
        """Reads the reports of a process until it ends; returns whether it ever served."""
        served = False
        with contextlib.suppress(OSError, ValueError):
            while (message := await child.channel.receive()) is not None:
                if isinstance(message, Failed):
                    self._fail(message.error)
                elif isinstance(message, Shutdown):
                    self._on_shutdown()
                elif isinstance(message, Scale):
                    task = asyncio.create_task(self._scale(child, message.size))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif isinstance(message, AdapterNews):
                    self._adapters[message.name] = message
                    await self._send_all(message)
                elif isinstance(message, Serving):
                    served = True
                    self._serving.add(index)
                    if len(self._serving) == len(self._listeners):
                        self._on_serving(message.model_names, "")
        return served

    async def _scale(self, child: Child, size: int) -> None:
        self._num_scaling += 1
        try:
            await self._send_all(Scaling(under_way=True))
            answer = await self._on_scale(size)
        finally:
            self._num_scaling -= 1
        await self._send_all(Scaling(self._num_scaling > 0))
        await _send(child, answer)

    async def _send_all(self, message: ApiOrder) -> None:
        """To all at once: each gets the messages in the order of the calls, also while another reads nothing."""
        await asyncio.gather(*(_send(child, message) for child in self._children.values()))


async def _send(child: Child, *messages: ApiOrder) -> None:
    with contextlib.suppress(OSError):  # it is dying; its successor is told when it starts
        await child.channel.send(*messages)
