"""`POST /collective_rpc`: a method of every worker, if its name is allowed. On the admin listener only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from frame.core.interfaces.endpoint import Endpoint, RequestError
from frame.interfaces import BoundedModel

#: What only the engine may call: it would go past the scheduler, or past what other admin routes check.
_ENGINES = frozenset(
    (
        "start",
        "execute",
        "sample",
        "call",
        "run",
        "check",
        "close",
        "sleep",
        "wake_up",
        "update_weights",
        "check_weights",
    )
)
_MAX_NAME = 128


class RpcBody(BoundedModel):
    """Which method, and its keyword arguments as JSON."""

    not_served: ClassVar[Mapping[str, str]] = {"args": "give arguments by name, as kwargs"}

    method: str = Field(min_length=1, max_length=_MAX_NAME)
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    timeout: float | None = Field(None, gt=0, le=86400)


class WorkersEndpoint(Endpoint):
    """Calls of workers. Without `--rpc-methods` the route says that none may be called."""

    admin: ClassVar[bool] = True

    def __init__(self, *, config: Any, options: Any = None, serving: Any) -> None:
        super().__init__(config=config, options=options, serving=serving)
        self._methods: list[str] = config.server.rpc_methods
        wrong = next((name for name in self._methods if name in _ENGINES or name.startswith("_")), None)
        if wrong is not None:
            raise ValueError(f"rpc_methods may not name {wrong!r}: only the engine calls it; other admin routes do")

    def router(self) -> APIRouter:
        """`POST /collective_rpc`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": RpcBody.model_json_schema()}}}}
        router.add_api_route("/collective_rpc", self._call, methods=["POST"], openapi_extra=schema)
        return router

    async def _call(self, request: Request) -> Response:
        """`results` has what each worker returned, by rank."""
        body: RpcBody = self.serving.parse(request, RpcBody)
        if body.method not in self._methods:
            known = ", ".join(self._methods) or "none"
            text = f"method {body.method!r} may not be called; there are: {known} (--rpc-methods)"
            raise RequestError(403, text, param="method")
        if "method" in body.kwargs:
            raise RequestError(400, "kwargs may not hold 'method'", param="kwargs")
        call = self.serving.control("worker", {"method": body.method, **body.kwargs})
        try:
            results = await asyncio.wait_for(call, body.timeout)
        except TimeoutError:
            text = f"{body.method} did not answer within {body.timeout:g} seconds; it may still run"
            raise RequestError(504, text, code="deadline_exceeded") from None
        return Response(msgspec.json.encode({"results": results}), media_type="application/json")
