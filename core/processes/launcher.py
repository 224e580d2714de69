"""The parent of a server: binds the address, starts and ends the engine and the API processes.

Tells the API processes how the engine is. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from frame.elastic.asking import answer
from frame.elastic.supervisor import DataParallelSupervisor
from frame.links.headless import serve_headless

from ..config.errors import ConfigError
from ..config.tree import FrameConfig
from ..server.certificates import tls_context
from .api_supervisor import ApiSupervisor
from .child_process import describe
from .listeners import bind_admin, bind_all, close_all, url
from .messages import EngineDown, EngineNews, Engines, EngineUp, Stage

_STOP_SECONDS = 5.0
#: Exit statuses.
OK, FAILED, INTERRUPTED = 0, 1, 130


class Launcher:
    """Runs one server from its bound address to its end."""

    def __init__(
        self,
        config: FrameConfig,
        listeners: Sequence[socket.socket],
        engine_command: Sequence[str] | None = None,
        admin: socket.socket | None = None,
    ) -> None:
        self._config = config
        self._listeners = listeners
        self._supervisor = DataParallelSupervisor(config, self._news, engine_command)
        self._started = time.monotonic()
        self._admin = admin
        self._apis = ApiSupervisor(
            config,
            listeners,
            self._on_serving,
            admin=admin,
            on_shutdown=self._on_signal,
            on_scale=lambda size: answer(self._supervisor.engines.scale(size)),
        )
        self._engines: dict[int, EngineUp | EngineDown] = {}
        self._number = len(config.data_parallel.served_ranks)
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signals = 0

    async def run(self) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(self._guard(part)) for part in (self._run_engine(), self._apis.run())]
        try:
            return await self._end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            seconds = 0 if self._signals > 1 or not self._engines else _STOP_SECONDS
            await self._apis.stop(seconds)
            await self._supervisor.stop(seconds)
            close_all(self._config.server, *self._listeners, self._admin)

    @property
    def _all_gone(self) -> bool:
        return all(isinstance(one, EngineDown) and one.final for one in self._engines.values())

    def _named(self, rank: int, text: str) -> str:
        return f"engine {rank}: {text}" if self._number > 1 else text

    def _say(self, text: str) -> None:
        _print(f"frame: {time.monotonic() - self._started:6.1f} s  {text}")

    def _finish(self, status: int, cause: str | None = None) -> None:
        if not self._end.done():
            if cause is not None:
                _print(f"frame: {cause}")
            self._end.set_result(status)

    def _on_signal(self) -> None:
        """The first signal drains, also while the engine restarts; the second ends at once.

        Before the engine was first ready, the first signal ends at once too, since no request is lost.
        """
        self._signals += 1
        if self._signals > 1 or not self._engines:
            if self._signals == 1:
                self._say("stopping: the server had not started yet")
            self._finish(INTERRUPTED if self._signals > 1 else OK)
            return
        self._say(f"stopping: running requests get {self._config.server.drain_seconds:g} s; again to stop at once")
        self._apis.drain()

    async def _news(self, message: EngineNews) -> None:
        """Logs the engine's state and passes it on to the API processes."""
        if isinstance(message, Stage):
            self._say(self._named(message.rank, message.name))
        elif isinstance(message, Engines):
            self._say(message.error)
            self._number = message.size
            self._engines = {rank: EngineDown(message.error, False, rank) for rank in range(message.size)}
        else:
            self._engines[message.rank] = message
        if isinstance(message, EngineDown) and not message.final:
            self._say(f"{self._named(message.rank, message.error)}; starting it again")
        elif isinstance(message, EngineDown) and not self._all_gone:  # of the last one the cause is logged at the end
            fate = f"it {'may come back' if message.away else 'is not started again'}, the others serve on"
            if self._config.executor.enable_expert_parallel:
                fate = "the others share its experts and end, too"
            self._say(f"{self._named(message.rank, message.error)}; {fate}")
        await self._apis.tell(message)

    def _on_serving(self, names: Sequence[str] | None, death: str) -> None:
        """Logs that all API processes serve under these names, or that one of them died."""
        if names is None:
            self._say(f"{death}; starting it again")
        else:
            place = url(self._listeners[0], secure=self._config.server.ssl_certfile is not None)
            self._say(f"serving {', '.join(names)} at {place}")
            if self._admin is not None:
                self._say(f"admin routes at {url(self._admin)}")

    async def _guard(self, part: Coroutine[Any, Any, str | None]) -> None:
        """Ends the server when one of its parts has ended, with the cause when that failed for good."""
        try:
            cause = await part
        except Exception as error:
            cause = describe(error)
        self._finish(OK if cause is None else FAILED, cause)

    async def _run_engine(self) -> str:
        await self._supervisor.start()
        await self._supervisor.wait()
        downs = [one for one in self._engines.values() if isinstance(one, EngineDown)]
        return "; ".join(self._named(one.rank, one.error) for one in downs) or "the engine is gone"


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads stderr any more: the server still serves, and ends when told to
        print(line, file=sys.stderr, flush=True)


def share_between_keys(config: FrameConfig) -> FrameConfig:
    """With API keys, the scheduling policy is "fair" unless one was set."""
    if not config.server.api_key or "scheduling_policy" in config.scheduler.model_fields_set:
        return config
    scheduler = config.scheduler.model_copy(update={"scheduling_policy": "fair"})
    return config.model_copy(update={"scheduler": scheduler})


def launch(config: FrameConfig, engine_command: Sequence[str] | None = None) -> int:
    """Binds the address and runs a server until it ends; returns the exit status. Raises `ConfigError` at once.

    A `headless` one only starts engines for a server elsewhere.
    """
    try:
        config.data_parallel.key()
    except ValueError as error:
        raise ConfigError(f"data_parallel_{error}") from None
    if config.data_parallel.headless:
        return serve_headless(config, engine_command)
    config = share_between_keys(config)
    tls_context(config.server)  # unusable certificate files end the start at once
    listeners = bind_all(config.server)
    try:
        admin = bind_admin(config.server)
    except ConfigError:
        close_all(config.server.model_copy(update={"admin_uds": None}), *listeners)
        raise

    async def run() -> int:
        return await Launcher(config, listeners, engine_command, admin).run()

    return asyncio.run(run())
