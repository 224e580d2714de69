"""A route policy of any package, whose faults cost no request: one line says which policy raised or gave what."""

from __future__ import annotations

import asyncio
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from frame.kv_events.changes import KVChange

from .fleet import FleetServer
from .policy import Ask, Route, RoutePolicy, RouteRequest

logger = logging.getLogger("frame.route")

_FIGURE = re.compile("[a-z][a-z0-9_]*")


class AskedPolicy:
    """Asks `policy`, which is chosen by `name`."""

    def __init__(self, policy: RoutePolicy, name: str) -> None:
        self._policy = policy
        self._name = name
        self._logged: set[str] = set()

    @property
    def prepares(self) -> bool:
        """Whether it is to see requests before they are routed."""
        return self._policy.prepares

    async def prepare(self, request: RouteRequest, servers: Sequence[FleetServer], ask: Ask) -> None:
        """As `RoutePolicy.prepare`, but raises nothing."""
        try:
            await self._policy.prepare(request, servers, ask)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the request ends, and not what the policy waited for
                raise
            self._unprepared(error)
        except Exception as error:  # of a plugin, which may raise anything
            self._unprepared(error)

    def route(self, request: RouteRequest, servers: Sequence[FleetServer], prefills: Sequence[FleetServer]) -> Route:
        """As `RoutePolicy.route`; the server with the fewest requests of this front where it gives none of these."""
        try:
            route = self._policy.route(request, servers, prefills)
            problem = _wrong(route, servers, prefills)
        except (Exception, asyncio.CancelledError) as error:
            problem = _sentence(error)
        if problem is None:
            return route
        logger.error(
            "route policy %r has not chosen a server, so the one with the least load gets the request: %s",
            self._name,
            problem,
        )
        return Route(min(servers, key=lambda server: server.in_flight))

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        """As `RoutePolicy.kv_changed`, but raises nothing; called from a thread."""
        try:
            self._policy.kv_changed(server, rank, change)
        except Exception as error:
            self._log_once(f"failed in kv_changed: {_sentence(error)}")

    def figures(self) -> Mapping[str, float]:
        """As `RoutePolicy.figures`, those that can be shown."""
        found: Any
        try:
            found = self._policy.figures()
        except Exception as error:
            logger.error("route policy %r does not say what it has counted: %s", self._name, _sentence(error))
            return {}
        if not isinstance(found, Mapping):
            self._log_once(f"gives figures that are no names → numbers: {reprlib.repr(found)}")
            return {}
        return {name: value for name, value in list(found.items()) if self._is_figure(name, value)}

    def _is_figure(self, name: Any, value: Any) -> bool:
        if not (isinstance(name, str) and _FIGURE.fullmatch(name)):
            self._log_once(f"counts {reprlib.repr(name)}, which is no name of a figure")
        elif not isinstance(value, int | float):
            self._log_once(f"counts {name!r} as {reprlib.repr(value)}, which is no number")
        else:
            return True
        return False

    def _log_once(self, problem: str) -> None:
        if problem not in self._logged and len(self._logged) < 100:
            self._logged.add(problem)
            logger.error("route policy %r %s", self._name, problem)

    def _unprepared(self, error: BaseException) -> None:
        logger.error("route policy %r has not prepared a request: %s", self._name, _sentence(error))


def _wrong(route: Any, servers: Sequence[FleetServer], prefills: Sequence[FleetServer]) -> str | None:
    """What is wrong with what `route` gave; None if nothing is."""
    if not isinstance(route, Route):
        return f"it gave {reprlib.repr(route)}, which is no Route"
    if not any(route.server is one for one in servers):
        return f"it names {_shown(route.server)}; there are: {_urls(servers)}"
    if route.prefill is not None and not any(route.prefill is one for one in prefills):
        return f"it names {_shown(route.prefill)} for the prompt; there are: {_urls(prefills)}"
    return None


def _shown(server: Any) -> str:
    if isinstance(server, FleetServer):
        return server.url
    return repr(server[:200]) if isinstance(server, str) else reprlib.repr(server)


def _urls(servers: Sequence[FleetServer]) -> str:
    return ", ".join(server.url for server in servers) or "none"


def _sentence(error: BaseException) -> str:
    """In one line: a message may have several."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
