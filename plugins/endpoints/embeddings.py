"""`POST /v1/embeddings`: texts or token ids in, vectors out."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from frame.interfaces import Endpoint

from .json_response import json_response
from .names import response_name
from .pooling_answers import Pooled, PooledItem, pool_all, usage_of
from .pooling_bodies import EmbeddingBody


class EmbeddingsEndpoint(Endpoint):
    """OpenAI's embeddings."""

    def router(self) -> APIRouter:
        """`POST /v1/embeddings`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": EmbeddingBody.model_json_schema()}}}}
        router.add_api_route("/v1/embeddings", self._create, methods=["POST"], openapi_extra=schema)
        return router

    async def _create(self, request: Request) -> Response:
        serving = self.serving
        body: EmbeddingBody = serving.http.parse(request, EmbeddingBody)
        model = serving.models.served(body.model)
        serving.models.require("embed")
        name = response_name("embd", request, body.request_id)
        params = body.params(task="embed", dimensions=body.dimensions, normalize=body.normalize)
        outputs = await serving.http.race(request, pool_all(serving, body, params, name))
        items = [
            PooledItem(index, "embedding", embedding=body.encoded(output.outputs.data))
            for index, output in enumerate(outputs)
        ]
        usage = usage_of([len(output.prompt_token_ids) for output in outputs])
        return json_response(Pooled(name, "list", int(time.time()), model, items, usage))
