"""`GET /v1/models`: the names that requests may use."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from frame.interfaces import AdapterCard, Endpoint

from .json_response import json_response


class ModelCard(msgspec.Struct):
    """One name, for OpenAI's and Anthropic's clients alike. `root` is the name that responses carry.

    Of an adapter `root` is its folder, and `parent` the model.

    `max_input_tokens` leaves room for one token of an answer.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    max_input_tokens: int
    created_at: str
    display_name: str
    object: str = "model"
    type: str = "model"
    lifecycle: str = "active"
    owned_by: str = "frame"
    parent: str | None = None


class ModelsEndpoint(Endpoint):
    """The list of models."""

    def router(self) -> APIRouter:
        """`GET /v1/models` and `GET /v1/models/{id}`."""
        router = APIRouter()
        router.add_api_route("/v1/models", self._list, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self._one, methods=["GET"])
        return router

    async def _list(self) -> Response:
        cards = [self._card(name) for name in self.serving.models.names]
        cards += [self._adapter(one) for one in await self.serving.models.adapters()]
        ends = {"first_id": cards[0].id, "last_id": cards[-1].id, "has_more": False}
        return json_response({"object": "list", "data": cards, **ends})

    async def _one(self, name: str) -> Response:
        adapters = {one.name: one for one in await self.serving.models.adapters()}
        if name in adapters:
            return json_response(self._adapter(adapters[name]))
        return json_response(self._card(self.serving.models.served(name)))

    def _adapter(self, adapter: AdapterCard) -> ModelCard:
        return msgspec.structs.replace(
            self._card(adapter.name), created=adapter.created, root=adapter.path, parent=adapter.parent
        )

    def _card(self, name: str) -> ModelCard:
        models = self.serving.models
        since = datetime.fromtimestamp(models.created, UTC).isoformat()
        longest = models.limits.max_model_len
        return ModelCard(name, models.created, models.names[0], longest, longest - 1, since, name)
