"""What operators ask: `/health`, `/ping`, `/version`, `/metrics`."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from frame import __version__
from frame.core.interfaces.endpoint import Endpoint, RequestError


class ServerEndpoint(Endpoint):
    """Health without a key, the rest with it."""

    def router(self) -> APIRouter:
        """All four routes."""
        router = APIRouter()
        for path, handler in (
            ("/health", self._health),
            ("/ping", self._health),
            ("/version", self._version),
            ("/metrics", self._metrics),
        ):
            router.add_api_route(path, handler, methods=["GET"])
        return router

    async def _health(self) -> Response:
        """Status 200 while requests are served, else 503 with the reason."""
        problem = self.serving.error
        if problem is not None:
            raise RequestError(503, problem)
        return Response(status_code=200)

    async def _version(self) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    async def _metrics(self) -> Response:
        text = self.serving.exposition(await self.serving.stats())
        return Response(text, media_type=CONTENT_TYPE_LATEST)
