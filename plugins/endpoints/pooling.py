"""`POST /pooling` and `POST /classify`: the rows of a pooling model, and the probabilities of its classes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from frame.interfaces import Endpoint

from .json_response import json_response
from .names import response_name
from .pooling_answers import ClassItem, Pooled, PooledItem, pool_all, usage_of
from .pooling_bodies import ClassifyBody, PoolingBody


class PoolingEndpoint(Endpoint):
    """vLLM's routes, also below /v1."""

    def router(self) -> APIRouter:
        """`POST /pooling`, `/classify` and the same below /v1."""
        router = APIRouter()
        routes: tuple[tuple[str, Any, Any], ...] = (
            ("/pooling", self._pool, PoolingBody),
            ("/classify", self._classify, ClassifyBody),
        )
        for path, handler, kind in routes:
            schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
            for place in (path, f"/v1{path}"):
                router.add_api_route(place, handler, methods=["POST"], openapi_extra=schema)
        return router

    async def _pool(self, request: Request) -> Response:
        serving = self.serving
        body: PoolingBody = serving.http.parse(request, PoolingBody)
        model = serving.models.served(body.model)
        serving.models.require(body.task or "encode")
        name = response_name("pool", request, body.request_id)
        params = body.params(
            task=body.task, dimensions=body.dimensions, normalize=body.normalize, use_activation=body.use_activation
        )
        outputs = await serving.http.race(request, pool_all(serving, body, params, name))
        items = [
            PooledItem(index, "pooling", data=body.encoded(output.outputs.data)) for index, output in enumerate(outputs)
        ]
        return _answer(name, model, items, outputs)

    async def _classify(self, request: Request) -> Response:
        serving = self.serving
        body: ClassifyBody = serving.http.parse(request, ClassifyBody)
        model = serving.models.served(body.model)
        serving.models.require("classify")
        name = response_name("classify", request, body.request_id)
        params = body.params(task="classify", use_activation=body.use_activation)
        outputs = await serving.http.race(request, pool_all(serving, body, params, name))
        labels = facts.labels if (facts := serving.models.pooling) is not None else []
        items = []
        for index, output in enumerate(outputs):
            probs = output.outputs.data.tolist()
            best = max(range(len(probs)), key=probs.__getitem__)
            items.append(ClassItem(index, labels[best] if best < len(labels) else None, probs, len(probs)))
        return _answer(name, model, items, outputs)


def _answer(name: str, model: str, items: Sequence[Any], outputs: Sequence[Any]) -> Response:
    usage = usage_of([len(output.prompt_token_ids) for output in outputs])
    return json_response(Pooled(name, "list", int(time.time()), model, items, usage))
