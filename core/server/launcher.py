"""The parent of a server: binds the address, starts the engine and the API process, passes news on, ends them.

Knows no request and no route; imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import stat
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from ..config.errors import ConfigError
from ..config.tree import FrameConfig, ServerConfig
from .engine_process import describe
from .messages import ApiReport, EngineDown, EngineNews, EngineUp, Failed, Serving, Stage
from .supervisor import Child, EngineSupervisor, frame_command, memory_file, spawn, write_config

_BACKLOG = 2048
_STOP_SECONDS = 5.0
#: Exit statuses.
OK, FAILED, INTERRUPTED = 0, 1, 130


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket at the configured address; raises `ConfigError` when it cannot be had."""
    if server.uds is not None:
        return _bind_unix(Path(server.uds))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:  # the latter: a host that is no name
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {getattr(error, 'strerror', None) or error}; "
            "choose another --port or --host"
        ) from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            try:
                listener.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()  # left by a server that is gone
            else:
                raise ConfigError(f"cannot listen on {path}: a server listens there already")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def url(listener: socket.socket) -> str:
    """Where clients find the listener."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Launcher:
    """Runs one server from its bound address to its end."""

    def __init__(
        self, config: FrameConfig, listener: socket.socket, engine_command: Sequence[str] | None = None
    ) -> None:
        self._config = config
        self._listener = listener
        self._supervisor = EngineSupervisor(config, self._news, engine_command)
        self._started = time.monotonic()
        self._api: Child | None = None
        self._engine: EngineUp | EngineDown | None = None
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._signals = 0
        self._api_deaths = 0

    async def run(self) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [asyncio.create_task(self._guard(part)) for part in (self._run_engine(), self._run_api())]
        try:
            return await self._end
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            seconds = 0.2 if self._signals > 1 else _STOP_SECONDS
            if self._api is not None:
                await self._api.stop(seconds)
            await self._supervisor.stop(seconds)
            self._listener.close()
            if self._config.server.uds is not None:
                Path(self._config.server.uds).unlink(missing_ok=True)

    def _say(self, text: str) -> None:
        print(f"frame: {time.monotonic() - self._started:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _finish(self, status: int) -> None:
        if not self._end.done():
            self._end.set_result(status)

    def _fail(self, cause: str) -> None:
        if not self._end.done():
            print(f"frame: {cause}", file=sys.stderr, flush=True)
            self._finish(FAILED)

    def _on_signal(self) -> None:
        """The first signal drains, the second ends at once."""
        self._signals += 1
        if self._signals > 1 or self._api is None or not isinstance(self._engine, EngineUp):
            self._finish(INTERRUPTED if self._signals > 1 else OK)
            return
        self._say(f"stopping: running requests get {self._config.server.drain_seconds:g} s; again to stop at once")
        self._api.signal(signal.SIGTERM)

    async def _news(self, message: EngineNews) -> None:
        """Shows what the engine does and tells the API process."""
        if isinstance(message, Stage):
            self._say(message.name)
            return
        self._engine = message
        if isinstance(message, EngineDown) and not message.final:  # the last one is said at the end
            self._say(f"{message.error}; starting it again")
        await self._tell()

    async def _tell(self) -> None:
        if self._api is not None and self._engine is not None:
            with contextlib.suppress(OSError):  # it is dying; its successor is told when it starts
                await self._api.channel.send(self._engine)

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Ends the server with the cause when a part of it cannot go on."""
        try:
            await part
        except Exception as error:
            self._fail(describe(error))

    async def _run_engine(self) -> None:
        await self._supervisor.start()
        await self._supervisor.wait()
        self._fail(self._engine.error if isinstance(self._engine, EngineDown) else "the engine is gone")

    async def _run_api(self) -> None:
        """Keeps an API process alive."""
        descriptors = [write_config(self._config), self._listener.fileno(), memory_file("")]
        arguments = ["--config-file", f"/dev/fd/{descriptors[0]}", "--listen-fd", str(descriptors[1])]
        arguments += ["--metrics-fd", str(descriptors[2])]
        while True:
            self._api = api = await spawn(frame_command("api"), arguments, ApiReport, descriptors)
            await self._tell()
            served = await self._follow_api(api)
            death = await api.death()
            if self._signals:
                self._finish(OK)
                return
            self._api_deaths += 1
            if not served or self._api_deaths > self._config.server.max_engine_restarts:
                self._fail(f"the API process {death}")
                return
            self._say(f"the API process {death}; starting it again")

    async def _follow_api(self, api: Child) -> bool:
        """Reads what an API process reports until its end; returns whether it ever served."""
        served = False
        try:
            while (message := await api.channel.receive()) is not None:
                if isinstance(message, Failed):
                    self._fail(message.error)
                elif isinstance(message, Serving):
                    served = True
                    self._say(f"serving {', '.join(message.model_names)} at {url(self._listener)}")
        except (OSError, ValueError):
            pass
        return served


def launch(config: FrameConfig, engine_command: Sequence[str] | None = None) -> int:
    """Binds the address and runs a server until it ends; returns the exit status. Raises `ConfigError` at once."""
    listener = bind(config.server)

    async def run() -> int:
        return await Launcher(config, listener, engine_command).run()

    return asyncio.run(run())
