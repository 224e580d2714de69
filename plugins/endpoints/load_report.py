"""Reports the engine's load in a header of answers, as ORCA defines it for load balancers.

A request asks for a report with a header that names its format. Knows no route.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frame.interfaces import KNOWN, EngineStats

_ASKED = b"endpoint-load-metrics-format"
_ANSWERED = b"endpoint-load-metrics"
_DIGITS = 6
#: Most seconds that a report may be old, since each query of the engine takes time between two steps and delays the
#: answer.
_RECENT_SECONDS = 0.1


def load_report(stats: EngineStats, form: str) -> str | None:
    """The value of the header in one of the forms TEXT and JSON; None for any other."""
    metrics = {
        "kv_cache_usage_perc": round(stats.kv_usage, _DIGITS),
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
    }
    if form == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    if form == "JSON":
        return "JSON " + json.dumps({"named_metrics": metrics})
    return None


class RecentStats:
    """Statistics that are at most `seconds` old. Callers that ask at the same time share one query."""

    def __init__(self, ask: Callable[[], Awaitable[EngineStats]], seconds: float = _RECENT_SECONDS) -> None:
        self._ask = ask
        self._seconds = seconds
        self._answer: asyncio.Task[EngineStats] | None = None
        self._stale = 0.0

    async def __call__(self) -> EngineStats:
        """The engine's statistics, at most `seconds` old."""
        if self._answer is None or (self._answer.done() and asyncio.get_running_loop().time() >= self._stale):
            self._answer = asyncio.create_task(self._fetch())
        return await asyncio.shield(
            self._answer
        )  # shielded, so that a caller that is cancelled does not cancel it for the others

    async def _fetch(self) -> EngineStats:
        try:
            return await self._ask()
        finally:
            self._stale = asyncio.get_running_loop().time() + self._seconds


class LoadReports:
    """ASGI middleware after the ingress: requests with a checked key get a report, health checks get none."""

    def __init__(self, app: ASGIApp, stats: Callable[[], Awaitable[EngineStats]]) -> None:
        self._app = app
        self._stats = RecentStats(stats)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request; the report is taken when its answer begins."""
        if not scope.get(KNOWN):
            await self._app(scope, receive, send)
            return
        asked = next((value for name, value in scope.get("headers", ()) if name == _ASKED), None)
        form = None if asked is None else asked.decode("latin-1").strip().upper()
        if form is None or load_report(EngineStats(), form) is None:
            await self._app(scope, receive, send)
            return

        async def reporting(message: Message) -> None:
            if message["type"] == "http.response.start" and (report := load_report(await self._stats(), form)):
                message = {**message, "headers": [*message.get("headers", ()), (_ANSWERED, report.encode())]}
            await send(message)

        await self._app(scope, receive, reporting)
