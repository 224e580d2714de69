"""`GET /v1/models`: the names that requests may use."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from frame.core.interfaces.endpoint import Endpoint


class ModelCard(msgspec.Struct):
    """One name. `root` is the name that responses carry."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "frame"
    parent: str | None = None


class ModelsEndpoint(Endpoint):
    """OpenAI's list of models."""

    def router(self) -> APIRouter:
        """`GET /v1/models` and `GET /v1/models/{id}`."""
        router = APIRouter()
        router.add_api_route("/v1/models", self._list, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self._one, methods=["GET"])
        return router

    async def _list(self) -> Response:
        cards = [self._card(name) for name in self.serving.model_names]
        return _json({"object": "list", "data": cards})

    async def _one(self, name: str) -> Response:
        return _json(self._card(self.serving.model(name)))

    def _card(self, name: str) -> ModelCard:
        serving = self.serving
        return ModelCard(name, serving.created, serving.model_names[0], serving.limits.max_model_len)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
