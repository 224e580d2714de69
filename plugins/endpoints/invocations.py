"""`POST /invocations`: accepts the bodies of the other routes, for hosting platforms that call one address only.

SageMaker calls only `/ping` and `/invocations`; the fields of the body decide which route answers.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, model_validator

from frame.interfaces import BoundedModel, Endpoint, Name, RequestError

_ROUTES = (
    ("/v1/chat/completions", ("messages",)),
    ("/v1/completions", ("prompt",)),
    ("/rerank", ("query", "documents")),
    ("/score", ("text_1", "text_2")),
    ("/score", ("queries", "documents")),
    ("/score", ("data_1", "data_2")),
)
#: What an `input` means to a pooling model, by the first task that it does.
_INPUTS = (("embed", "/v1/embeddings"), ("classify", "/classify"), ("encode", "/pooling"))
_CHOICES = "messages, prompt, input, query with documents, or text_1 with text_2"


class InvocationBody(BoundedModel):
    """The body of a chat, completion, embedding, classification, pooling, score or rerank: its route checks it."""

    model_config = ConfigDict(extra="allow")

    model: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        """Replaces the check of `BoundedModel`: which fields are unknown is for the route to say."""
        return data


class InvocationsEndpoint(Endpoint):
    """SageMaker's route."""

    def router(self) -> APIRouter:
        """`POST /invocations`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": InvocationBody.model_json_schema()}}}}
        router.add_api_route("/invocations", self._invoke, methods=["POST"], openapi_extra=schema)
        return router

    async def _invoke(self, request: Request) -> Response:
        """The answer of the route that the body is for, also an error or a stream."""
        body: InvocationBody = self.serving.http.parse(request, InvocationBody)
        given = {name for name, value in (body.model_extra or {}).items() if value is not None}
        response: Response = self.serving.http.forward(self._route(given))
        return response

    def _route(self, given: Set[str]) -> str:
        for path, fields in _ROUTES:
            if given >= set(fields):
                return path
        if "input" not in given:
            raise RequestError(400, f"the body is for no route: it needs {_CHOICES}")
        tasks = () if self.serving.models.pooling is None else self.serving.models.pooling.tasks
        return next((path for task, path in _INPUTS if task in tasks), "/v1/embeddings")
