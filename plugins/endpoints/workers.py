"""`POST /collective_rpc`: calls a method of every worker, if its name is allowed. On the admin listener only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter
from fastapi.requests import Request
from fastapi.responses import Response
from pydantic import Field

from frame.interfaces import BoundedModel, Endpoint, EndpointSetup, RequestError
from frame.quoting import quoted

from .json_response import json_response

_MAX_NAME = 128


class RpcBody(BoundedModel):  # type: ignore[no-redef]  # mypy: the field has the name of an argument of __init__
    """Which method, and its keyword arguments as JSON."""

    not_served: ClassVar[Mapping[str, str]] = {"args": "give arguments by name, as kwargs"}

    method: str = Field(min_length=1, max_length=_MAX_NAME)
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)


class WorkersEndpoint(Endpoint):
    """Calls of workers. Without `--rpc-methods` the route says that none may be called."""

    admin: ClassVar[bool] = True

    def __init__(self, setup: EndpointSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._methods = self.settings.rpc_methods

    def router(self) -> APIRouter:
        """`POST /collective_rpc`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": RpcBody.model_json_schema()}}}}
        router.add_api_route("/collective_rpc", self._call, methods=["POST"], openapi_extra=schema)
        return router

    async def _call(self, request: Request) -> Response:
        """`results` holds what each worker returned, by rank. The server's ingress reads the field `timeout`."""
        body: RpcBody = self.serving.http.parse(request, RpcBody)
        if body.method not in self._methods:
            known = ", ".join(self._methods) or "none"
            text = f"method {quoted(body.method)} may not be called; --rpc-methods allows: {known}"
            raise RequestError(403, text, param="method")
        if "method" in body.kwargs:
            raise RequestError(400, "kwargs may not hold 'method'", param="kwargs")
        results = await self.serving.engine.control("worker", {"method": body.method, **body.kwargs})
        return json_response({"results": results})
