"""A route: `POST /example/continue` continues a text, in one answer or, with `"stream": true`, as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from frame import RequestOutputKind
from frame.interfaces import Endpoint, SamplingFields, Text


class ContinueBody(SamplingFields):
    """`SamplingFields` brings temperature, stop, seed, … with their bounds; unknown fields are reported by frame."""

    prompt: Text
    max_tokens: int = Field(16, ge=1, le=1024)
    stream: bool = False


class ContinueEndpoint(Endpoint):
    """Built once in each API process. `self.serving` is the server: models, text, generation, http, engine, batches."""

    def router(self) -> APIRouter:
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": ContinueBody.model_json_schema()}}}}
        router.add_api_route("/example/continue", self._continue, methods=["POST"], openapi_extra=schema)
        return router

    async def _continue(self, request: Request) -> Response:
        serving = self.serving
        body = serving.http.parse(request, ContinueBody)  # a wrong body is an answer with status 400
        serving.models.require("generate")
        params = serving.generation.params(body, max_tokens=body.max_tokens, n=1, output_kind=RequestOutputKind.DELTA)
        outputs = serving.generation.generate({"prompt": body.prompt}, params, f"continue-{uuid.uuid4().hex}")
        if body.stream:
            return serving.http.events(_events(outputs))
        return JSONResponse(await serving.http.race(request, _answer(outputs)))


async def _answer(outputs: AsyncGenerator[Any, None]) -> dict[str, Any]:
    texts, num_tokens, reason = [], 0, None
    async for output in outputs:
        completion = output.outputs[0]  # DELTA: what is new since the output before
        texts.append(completion.text)
        num_tokens += len(completion.token_ids)
        reason = completion.finish_reason
    return {"text": "".join(texts), "num_tokens": num_tokens, "finish_reason": reason}


async def _events(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for output in outputs:
            yield b"data: " + json.dumps({"text": output.outputs[0].text}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        await outputs.aclose()  # a client that hangs up ends the request in the engine
