"""The process of `frame route`: listens, looks after the servers, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, cast

from frame.core.config.errors import ConfigError
from frame.core.interfaces.setup import Setup
from frame.core.plugin_host.registry import Registry
from frame.core.processes.child_process import allow_files
from frame.core.processes.listeners import bind, close_all, url
from frame.core.server.certificates import tls_context
from frame.core.server.http import Server, make_server
from frame.quoting import quoted

from .asked_policy import AskedPolicy
from .fleet import Fleet
from .forwarding import Bounds, Forwarding
from .front import Front
from .health import HealthWatch
from .page import page_files
from .upstream import Upstream

if TYPE_CHECKING:
    from frame.core.interfaces.provider import Provider
    from frame.kv_events.followers import Followers

    from .policy import RoutePolicy
    from .settings import RouteSettings

logger = logging.getLogger("frame.route")

_DRAIN_POLL_SECONDS = 0.02
#: Seconds that a thread which reads KV events may hold up requests.
_SWITCH_SECONDS = 0.0005
#: Seconds that requests which are ended have to say so to their clients.
_FAREWELL_SECONDS = 1.0


class FrontParts(NamedTuple):
    """A front and what it is made of; all of it belongs to the running event loop."""

    front: Front
    forwarding: Forwarding
    fleet: Fleet
    watch: HealthWatch
    upstream: Upstream
    http: Server
    followers: Followers | None = None


def make_front(settings: RouteSettings, policy: RoutePolicy, name: str) -> FrontParts:
    """A front that nobody has asked yet; `name` is the policy's."""
    server = settings.config.server
    tls = tls_context(server)
    fleet = Fleet(settings.servers)
    asked = AskedPolicy(policy, name)
    followers = _follow(settings, policy, asked, name, fleet)
    upstream = Upstream(settings.server_key, settings.connect_seconds)
    bounds = Bounds(server.max_body_bytes, server.max_upload_bytes, settings.max_retries + 1, settings.clients_params)
    forwarding = Forwarding(fleet, asked, upstream, bounds)
    pages = page_files() if server.page else {}
    front = Front(server, fleet, forwarding, pages, {"policy": name}, asked.figures)
    watch = HealthWatch(fleet, upstream, settings.health_seconds, settings.file)
    return FrontParts(front, forwarding, fleet, watch, upstream, make_server(front, server, tls), followers)


def _follow(
    settings: RouteSettings, policy: RoutePolicy, asked: AskedPolicy, name: str, fleet: Fleet
) -> Followers | None:
    """Has the policy told of KV events, if it listens and the list names where they are; raises `ConfigError`."""
    from .policy import RoutePolicy

    named = any(server.kv_events for server in fleet.servers)
    if type(policy).kv_changed is RoutePolicy.kv_changed:
        if named:
            logger.warning("the policy %s takes no KV events: their addresses have no effect (--policy prefix)", name)
        return None
    if not named:
        logger.warning("the policy %s is told of no KV events: no server has an address of them (--kv-events)", name)
        if settings.file is None:
            return None
    try:
        from frame.kv_events.followers import Followers, KVSource
    except ImportError:
        if not named:
            return None
        raise ConfigError("KV events need pyzmq: pip install 'frame-llm[events]'") from None
    followers = Followers(asked.kv_changed, settings.curve_key)

    def follow() -> None:
        followers.follow([
            KVSource(server.url, *addresses)
            for server in fleet.servers
            if server.kv_events is not None and not server.removed
            for addresses in server.kv_events.of_ranks()
        ])  # fmt: skip

    fleet.on_change = follow
    follow()
    return followers


class RouteProcess:
    """A front on a socket that is bound already."""

    def __init__(self, settings: RouteSettings, policy: RoutePolicy, name: str, listener: socket.socket) -> None:
        self._settings = settings
        self._policy = policy
        self._name = name
        self._listener = listener
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Serves until it is told to stop; returns the exit status."""
        parts = make_front(self._settings, self._policy, self._name)
        fleet, watch, http = parts.fleet, parts.watch, parts.http
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: self._stop(parts))
        await watch.look()
        looking = asyncio.create_task(watch.run())
        looking.add_done_callback(lambda task: self._watch_ended(task, http))
        place = url(self._listener, secure=self._settings.config.server.ssl_certfile is not None)
        logger.info("routing to %d servers (%s) at %s", len(fleet.servers), self._name, place)
        try:
            await http.serve(sockets=[self._listener])
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await parts.upstream.close()
            if parts.followers is not None:
                parts.followers.close()
        return 0

    def _watch_ended(self, task: asyncio.Task[None], http: Server) -> None:
        """Ends the front with its watch, without which it would send requests to servers that are gone."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("the watch over the servers failed, and the front ends", exc_info=task.exception())
            http.should_exit = True

    def _stop(self, parts: FrontParts) -> None:
        """Ends in order at the first signal, at once at the second."""
        if self._draining is not None:
            parts.forwarding.stop()
            return
        parts.front.draining = True
        self._draining = asyncio.create_task(self._drain(parts))

    async def _drain(self, parts: FrontParts) -> None:
        """Waits until all requests have ended, ends those that have not in time, and then the server."""
        seconds = self._settings.config.server.drain_seconds
        if count := parts.forwarding.active:
            logger.info("stopping once %d requests have ended, at most %g seconds", count, seconds)
        await _until_idle(parts.forwarding, seconds)
        parts.forwarding.stop()
        await _until_idle(parts.forwarding, _FAREWELL_SECONDS)
        parts.http.should_exit = True


async def _until_idle(forwarding: Forwarding, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while forwarding.active and time.monotonic() < deadline:
        await asyncio.sleep(_DRAIN_POLL_SECONDS)


def run_front(settings: RouteSettings) -> int:
    """Runs a front; raises `ConfigError` and `PluginError` before it listens. Returns the exit status."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = asyncio.new_event_loop
    registry = Registry.load()
    registry.check(settings.config)
    provider = registry.select("route-policy", settings.policy, lambda kind: None)
    _warn_of_unused(registry, settings, provider)
    policy = cast("RoutePolicy", registry.make("route-policy", provider, Setup(), settings.config))
    _check_client()
    allow_files()  # each request has two connections
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = settings.config.server
    listener = bind(server)
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(RouteProcess(settings, policy, provider.name, listener).run())
    finally:
        close_all(server, listener)


def _warn_of_unused(registry: Registry, settings: RouteSettings, used: Provider) -> None:
    """Names options of other plugins than the policy in the log: a front has no other plugin."""
    for given, values in settings.config.plugin.items():
        if values and not any(given in offer.names and offer.provider is used for offer in registry.offers):
            text = "options of plugin %s have no effect (%s): this front's route policy is %s"
            logger.warning(text, quoted(given), ", ".join(values), quoted(used.name))


def _check_client() -> None:
    """Raises `ConfigError` where the library that speaks to servers is not installed."""
    from importlib.util import find_spec

    if find_spec("aiohttp") is None:
        raise ConfigError('`frame route` needs aiohttp: pip install "frame-llm[route]"')
