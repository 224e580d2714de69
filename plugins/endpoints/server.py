"""Routes that show the state of a server.

`/health`, `/ping`, `/live`, `/ready`, `/startup`, `/version`, `/metrics`, `/load`, `/stats`.
"""

from __future__ import annotations

import time
from typing import ClassVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client.exposition import choose_encoder
from starlette.types import ASGIApp

from frame import __version__
from frame.interfaces import Endpoint, RequestError
from frame.transfers.measures import rows_by_tier

from .exposition import Exposition
from .json_response import json_response
from .load_report import LoadReports


class ServerEndpoint(Endpoint):
    """Health without a key, the rest with it."""

    modes: ClassVar[frozenset[str]] = frozenset(("text", "tokens"))

    def router(self) -> APIRouter:
        """All routes of the state."""
        router = APIRouter()
        for path, handler in (
            ("/health", self._health),
            ("/ping", self._health),
            ("/live", self._live),
            ("/ready", self._health),
            ("/startup", self._startup),
            ("/version", self._version),
            ("/metrics", self._metrics),
            ("/load", self._load),
            ("/stats", self._stats),
            ("/stats/history", self._history),
        ):
            router.add_api_route(path, handler, methods=["GET"])
        return router

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Adds reports of the engine's load to answers, for proxies that ask for them."""
        return LoadReports(app, self.serving.engine.stats)

    async def _health(self) -> Response:
        """Status 200 while requests are served, else 503 with the reason."""
        problem = self.serving.engine.error
        if problem is not None:
            raise RequestError(503, problem)
        return Response(status_code=200)

    async def _live(self) -> Response:
        """Status 200 whenever this process answers, also without an engine."""
        return Response(status_code=200)

    async def _startup(self) -> Response:
        """Status 200 once an engine has been ready, also while it restarts; before that 503 with the stage."""
        _ = self.serving.models.limits
        return Response(status_code=200)

    async def _version(self) -> Response:
        return json_response({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        """All metrics, as OpenMetrics where the Accept header asks for it, else as Prometheus' text."""
        engine, model = self.serving.engine, self.serving.models.names[0]
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        stats, counts = await engine.stats(), self.serving.http.counts()
        metrics = Exposition(model, counts, stats, engine.info, self.settings.vllm_metrics)
        return Response(metrics.encoded(encode), headers={"content-type": content_type})

    async def _load(self) -> Response:
        """How many requests are being answered, for load balancers."""
        return json_response({"server_load": self.serving.http.load})

    async def _stats(self) -> Response:
        """The engine's counters and gauges now, for the live view; `time` is when, in Unix seconds.

        `tiers` has what the KV connector reports, a row for each of its tiers; [] without one.
        """
        found = await self.serving.engine.stats()
        stats = msgspec.structs.asdict(found)
        about = {"time": time.time(), "problem": self.serving.engine.error, "version": __version__}
        return json_response(
            {
                **about,
                "models": self.serving.models.names,
                "load": self.serving.http.load,
                "engine": stats,
                "tiers": rows_by_tier(found),
            }
        )

    async def _history(self) -> Response:
        """The engine's counters over the last two minutes of work, a sample a second; [] while no engine runs."""
        return json_response(
            await self.serving.engine.control("history", {}) if self.serving.engine.error is None else []
        )
