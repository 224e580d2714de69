"""An API process: the HTTP application over the text side, on a socket that its parent has bound.

The parent says where the engine is and when it is gone; this process serves `/health` from the start and everything
else from the first ready engine on. A process that replaces one that died answers nothing until it can serve. Does not
import torch itself.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from frame.elastic.asking import ScaleAsking
from frame.ranks.client import DataParallelClient, make_client
from frame.served.news import AdapterNews

from ..config.checkpoint import Checkpoint, read_checkpoint
from ..config.tree import FrameConfig
from ..front.output_parsers import OutputParsers, build_parsers
from ..interfaces.setup import Setup
from ..plugin_host.registry import Registry
from ..server.app import build_admin, build_app, make_endpoints
from ..server.certificates import tls_context
from ..server.http import Server, make_server
from ..server.ingress import Ingress
from ..server.keys import KeyLimits
from ..server.reports import Reporter
from ..server.serving import ServingHost
from .channel import AsyncChannel
from .child_process import allow_files, describe, die_with_parent
from .messages import ApiOrder, EngineUp, Failed, Scaled, Serving, Shutdown, Stage

if TYPE_CHECKING:
    from ..front.async_front import AsyncFront
    from ..front.tokenizer import TokenizerSource

logger = logging.getLogger("frame.server")

_DRAIN_POLL_SECONDS = 0.02
#: Seconds that running answers get to send the error that ends them.
_FAREWELL_SECONDS = 1.0
#: Seconds that they get when the parent has hung up and will end this process soon.
_HANGUP_SECONDS = 0.1
#: Seconds that connections to a replacement process wait until it serves; then they get an answer that says why not.
_SUCCESSION_SECONDS = 30.0
#: With fewer open files, which connections are, too, an operator is told.
_FEW_FILES = 256
#: Allocations between two garbage collections: with Python's default, a step of a thousand streams would trigger
#: several, and hardly any objects here form cycles.
_GC_THRESHOLDS = 50_000, 20, 50


class ApiProcess:
    """The life of API process number `index`: serves, follows the parent's messages, drains, ends.

    All API processes of a server share the memory `metrics_fd`, where they count requests, `limits_fd`, where they
    count what each key does, and `ranks_fd`, where they note what each engine has to do. A `successor` takes the place
    of a process that died.
    """

    def __init__(
        self,
        config: FrameConfig,
        listen_fd: int,
        control_fd: int,
        metrics_fd: int | None = None,
        limits_fd: int | None = None,
        ranks_fd: int | None = None,
        admin_fd: int | None = None,
        *,
        index: int = 0,
        successor: bool = False,
    ) -> None:
        self._config = config
        self._listener = socket.socket(fileno=listen_fd)
        self._control_socket = socket.socket(fileno=control_fd)
        self._client = make_client(config, ranks_fd, index)
        self._host = ServingHost(config, self._client, metrics_fd)
        self._limits = KeyLimits(config.server, limits_fd, index)
        self._admin_listener = None if admin_fd is None else socket.socket(fileno=admin_fd)
        self._admin: Server | None = None
        self._admin_app: Ingress | None = None
        self._draining: asyncio.Task[None] | None = None
        self._successor = successor
        self._asking = ScaleAsking()
        self._engine_up = asyncio.Event()  # set from the first engine on
        self._settled = asyncio.Event()  # set when it serves, cannot serve, or ends

    async def run(self) -> int:
        """Serves until told to stop; returns the exit status."""
        die_with_parent()
        control = await AsyncChannel.wrap(self._control_socket, ApiOrder)
        try:
            server, ingress = self._build()
        except Exception as error:
            logger.debug("the API process does not start", exc_info=True)
            await control.send(Failed(describe(error)))
            return 1
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.add_signal_handler(signal.SIGTERM, lambda: self._begin_drain(server, ingress))
        opening = asyncio.create_task(self._open(control))
        follow = asyncio.create_task(self._follow(control, server, ingress))
        self._host.shut_down = lambda: control.send(Shutdown())
        self._host.adapters.tell = control.send
        if isinstance(self._client, DataParallelClient):
            self._client.on_scale = self._asking.to(control)
        admin = []
        if self._admin is not None and self._admin_listener is not None:
            admin.append(asyncio.create_task(self._admin.serve([self._admin_listener])))
        try:
            if self._successor:
                await self._await_serving(follow)
            await server.serve(sockets=[self._listener])
        finally:
            await self._end_admin()
            follow.cancel()
            opening.cancel()
            await asyncio.gather(*admin, follow, opening, return_exceptions=True)
            await asyncio.to_thread(self._host.reporter.close)
            await asyncio.to_thread(self._host.text.close)
            await self._client.close()
            control.close()
        return 0

    async def _end_admin(self) -> None:
        """Has calls that still wait at the admin listener answered, and ends it."""
        server, app = self._admin, self._admin_app
        if server is not None and app is not None:
            self._asking.answered(Scaled(error="the server is stopping"))
            await self._client.drop("the server is stopping")
            await _wait_until(lambda: not app.active, _FAREWELL_SECONDS)
            server.should_exit = server.force_exit = True

    async def _await_serving(self, follow: asyncio.Task[None]) -> None:
        """Leaves connections in the listener's queue until they can be served: clients of a dead process reconnect."""
        settled = asyncio.create_task(self._settled.wait())
        await asyncio.wait((settled, follow), timeout=_SUCCESSION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()

    def _build(self) -> tuple[Server, Ingress]:
        registry = self._registry = Registry.load()
        registry.add_files(self._config)
        endpoints = make_endpoints(self._config, registry, self._host)
        names = dict.fromkeys(self._config.observability.metrics_sinks)
        sinks = [registry.make("sink", name, Setup(), self._config) for name in names]
        self._host.reporter = Reporter(self._host.models.names[0], sinks)
        if self._admin_listener is not None:
            administered = [endpoint for endpoint in endpoints if endpoint.admin]
            self._admin_app = build_admin(self._config, administered)
            self._admin = make_server(self._admin_app, self._config.server)
        endpoints = [endpoint for endpoint in endpoints if not endpoint.admin]
        app, ingress = build_app(self._config, self._host, endpoints, self._limits)
        server = self._config.server
        return make_server(app, server, tls_context(server)), ingress

    async def _follow(self, control: AsyncChannel, server: Server, ingress: Ingress) -> None:
        """Handles the parent's messages until the parent hangs up, which ends this process too."""
        try:
            while (message := await control.receive()) is not None:
                if isinstance(message, Scaled):
                    self._asking.answered(message)
                    continue
                if isinstance(message, AdapterNews):
                    self._host.adapters.hear(message)
                    continue
                await self._client.news(message)
                self._host.stage = message.name if isinstance(message, Stage) else None
                if isinstance(message, EngineUp) and self._client.ready:
                    self._engine_up.set()
        except (OSError, ValueError) as error:
            logger.error("a message of the parent process cannot be read: %s", describe(error))
        await self._end_running(ingress, "the server was stopped", _HANGUP_SECONDS)
        server.force_exit = server.should_exit = True

    async def _open(self, control: AsyncChannel) -> None:
        """Loads the tokenizer while the engine starts, and serves once both are there; tells the parent either way."""
        try:
            checkpoint, tokenizer = await asyncio.to_thread(self._load_text)
            await self._engine_up.wait()
            await self._host.adapters.start(self._registry)
            self._host.open(*await asyncio.to_thread(self._make_front, checkpoint, tokenizer))
        except Exception as error:
            logger.debug("the text side does not start", exc_info=True)
            await control.send(Failed(describe(error)))
            return
        finally:
            self._settled.set()
        gc.collect()
        gc.freeze()  # objects that exist now live for ever: the collector need not look at them again
        gc.set_threshold(*_GC_THRESHOLDS)
        await control.send(Serving(self._host.models.names))

    def _load_text(self) -> tuple[Checkpoint, TokenizerSource]:
        """The tokenizer, whose library takes as long to import as an engine to start."""
        from ..front.template import read_template
        from ..front.tokenizer import NoTokenizerError, TokenizerSource

        checkpoint = read_checkpoint(self._config)
        read_template(self._config.model.chat_template)
        tokenizer = TokenizerSource(self._config, checkpoint, self._registry)
        if tokenizer.folder is not None:
            try:
                tokenizer.get()
            except NoTokenizerError as error:
                logger.warning("requests with text will be refused: %s", error)
        return checkpoint, tokenizer

    def _make_front(self, checkpoint: Checkpoint, tokenizer: TokenizerSource) -> tuple[AsyncFront, OutputParsers]:
        from ..front.async_front import AsyncFront

        llm = AsyncFront(self._config, self._client, checkpoint, self._registry, tokenizer)
        return llm, build_parsers(llm.front)

    def _begin_drain(self, server: Server, ingress: Ingress) -> None:
        if self._draining is not None:
            server.force_exit = server.should_exit = True
            return
        self._host.draining = True
        self._settled.set()
        self._draining = asyncio.create_task(self._drain(server, ingress))

    async def _drain(self, server: Server, ingress: Ingress) -> None:
        """Refuses new requests, lets running ones finish in time, ends the rest with an error, and stops the server."""
        seconds = self._config.server.drain_seconds
        await _wait_until(lambda: not ingress.active, seconds)
        if ingress.active:
            reason = f"the server is stopping: the request did not end within {seconds:g} seconds (--drain-seconds)"
            await self._end_running(ingress, reason, _FAREWELL_SECONDS)
        server.should_exit = True

    async def _end_running(self, ingress: Ingress, reason: str, seconds: float) -> None:
        """Ends running requests with the error `reason`; their answers get `seconds` to be sent."""
        await self._client.drop(reason)
        await _wait_until(lambda: not ingress.active, seconds)


async def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Returns once `done()` is true, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        await asyncio.sleep(_DRAIN_POLL_SECONDS)


def run_api_process(config: FrameConfig, **inherited: Any) -> int:
    """Runs an `ApiProcess` on inherited sockets; returns the exit status."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (most := allow_files()) < _FEW_FILES and inherited.get("index", 0) == 0:
        logger.warning(
            "%d files may be open, and further connections are closed at once; raise it with ulimit -n", most
        )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(ApiProcess(config, **inherited).run())
