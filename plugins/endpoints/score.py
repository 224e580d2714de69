"""`POST /score`, and reranking in the forms of Jina (`/rerank`, `/v1/rerank`) and Cohere (`/v2/rerank`)."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from frame.interfaces import Endpoint

from .json_response import json_response
from .names import response_name
from .pooling_answers import Pooled, Reranked, RerankItem, ScoreItem, usage_of
from .pooling_bodies import RerankBody, ScoreBody
from .scoring import score_texts

_COHERE = "/v2/rerank"


class ScoreEndpoint(Endpoint):
    """Scores of pairs of texts: a cross-encoder's, or the cosine of embeddings."""

    def router(self) -> APIRouter:
        """The score routes and the rerank routes."""
        router = APIRouter()
        routes: tuple[tuple[str, Any, Any], ...] = (
            ("/score", self._score, ScoreBody),
            ("/v1/score", self._score, ScoreBody),
            ("/rerank", self._rerank, RerankBody),
            ("/v1/rerank", self._rerank, RerankBody),
            (_COHERE, self._rerank, RerankBody),
        )
        for path, handler, kind in routes:
            schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
            router.add_api_route(path, handler, methods=["POST"], openapi_extra=schema)
        return router

    async def _score(self, request: Request) -> Response:
        serving = self.serving
        body: ScoreBody = serving.http.parse(request, ScoreBody)
        model = serving.models.served(body.model)
        name = response_name("score", request, body.request_id)
        params = body.params(use_activation=body.use_activation)
        options = {"priority": body.priority, "cache_salt": body.cache_salt}
        scores = score_texts(serving, *body.pairs(), params, name, options)
        found = await serving.http.race(request, scores)
        items = [ScoreItem(index, "score", score.value) for index, score in enumerate(found)]
        usage = usage_of([score.num_tokens for score in found])
        return json_response(Pooled(name, "list", int(time.time()), model, items, usage))

    async def _rerank(self, request: Request) -> Response:
        serving = self.serving
        body: RerankBody = serving.http.parse(request, RerankBody)
        model = serving.models.served(body.model)
        name = response_name("rerank", request, body.request_id)
        texts = body.texts()
        options = {"priority": body.priority, "cache_salt": body.cache_salt}
        scores = score_texts(serving, [body.query] * len(texts), texts, body.params(), name, options)
        found = await serving.http.race(request, scores)
        cohere = request.url.path.endswith(_COHERE)
        results = [RerankItem(index, score.value) for index, score in enumerate(found)]
        results.sort(key=lambda item: (-item.relevance_score, item.index))
        results = results[: body.top_n]
        if body.return_documents if body.return_documents is not None else not cohere:
            for item in results:
                item.document = {"text": texts[item.index]}
        answer = Reranked(name, model, usage_of([score.num_tokens for score in found]), results)
        if cohere:
            answer.meta = {"api_version": {"version": "2"}}
        return json_response(answer)
