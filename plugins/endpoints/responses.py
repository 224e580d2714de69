"""`/v1/responses`: OpenAI's Responses API: whole, streamed or in the background; responses are stored for a while."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from frame.interfaces import Endpoint, EndpointSetup, RequestError
from frame.quoting import quoted

from .json_response import json_response
from .replies import Conversation, Reply
from .responses_bodies import InputBody, ResponsesBody
from .responses_chats import as_items, read_items
from .responses_run import ResponseRun, Tooling
from .responses_setup import fitting, new_response, resolve_tools
from .responses_store import ResponseStore, StoredResponse
from .tool_servers import ToolServers

logger = logging.getLogger("frame.server")

Object = dict[str, Any]

_MAX_PAGE = 100


class ResponsesOptions(BaseModel):
    """Bounds on the responses that each API process stores: `--plugin.responses.FIELD`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_responses: int = Field(1024, ge=1, description="Responses stored at most.")
    max_bytes: int = Field(256 << 20, ge=1 << 20, description="Bytes that stored responses take at most.")
    max_background: int = Field(64, ge=1, description="Background responses that are generated at once.")
    ttl_seconds: float = Field(3600.0, gt=0, description="Seconds that a response is stored.")


class ResponsesEndpoint(Endpoint):
    """Creates, stores and returns responses. Only the owner of the API key that made one can read it."""

    def __init__(self, setup: EndpointSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        bounds = options or ResponsesOptions()
        self._store = ResponseStore(bounds.max_responses, bounds.max_bytes, bounds.max_background, bounds.ttl_seconds)
        self._servers = ToolServers(self.settings.tool_server)
        self._details = self.settings.enable_prompt_tokens_details

    def router(self) -> APIRouter:
        """All routes."""
        router = APIRouter()
        for path, handler, kind in (
            ("/v1/responses", self._create, ResponsesBody),
            ("/v1/responses/input_tokens", self._count, InputBody),
        ):
            schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
            router.add_api_route(path, handler, methods=["POST"], openapi_extra=schema)
        one = "/v1/responses/{name}"
        router.add_api_route(one, self._retrieve, methods=["GET"])
        router.add_api_route(one, self._delete, methods=["DELETE"])
        router.add_api_route(f"{one}/cancel", self._cancel, methods=["POST"])
        router.add_api_route(f"{one}/input_items", self._input_items, methods=["GET"])
        return router

    async def _create(self, request: Request) -> Response:
        body: ResponsesBody = self.serving.http.parse(request, ResponsesBody)
        self.serving.models.require("generate")
        run, stored = await self._prepare(request, body)
        if body.background:
            return self._in_background(run, stored, body)
        await self.serving.http.race(request, run.begin())
        if not body.stream:
            await self.serving.http.race(request, self._drain(run, None))
            if body.store:
                self._store.add(stored)
            return json_response(run.response)
        if body.store:
            self._store.add(stored)
        events: Response = self.serving.http.events(self._recorded(run, stored if body.store else None))
        return events

    async def _prepare(self, request: Request, body: ResponsesBody) -> tuple[ResponseRun, StoredResponse]:
        """The run that generates the response, and its record for the store."""
        model = self.serving.models.served(body.model)
        owner = self.serving.http.owner(request)
        conversation, items, history, tooling = await self._conversation(body, owner)
        name = f"resp_{body.request_id or uuid.uuid4().hex}"
        response = new_response(name, model, body)
        run = ResponseRun(self.serving, body, response, conversation, tooling, self._servers)
        return run, StoredResponse(owner, response, items, [*history, *items])

    async def _conversation(
        self, body: InputBody, owner: str
    ) -> tuple[Conversation, list[Object], list[Object], Tooling]:
        """The chat, the items of this request, the items of earlier responses, and the tools that this server runs."""
        history: list[Object] = []
        if body.previous_response_id is not None:
            earlier = self._store.get(body.previous_response_id, owner)
            if earlier.running:
                raise RequestError(
                    400,
                    f"response {quoted(body.previous_response_id)} is still being generated",
                    param="previous_response_id",
                )
            history = [*earlier.history, *earlier.response["output"]]
        items = [{"id": f"item_{uuid.uuid4().hex}", "type": "message", **item} for item in as_items(body.input)]
        messages = read_items([*history, *items])
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        functions, choice, tooling = await resolve_tools(body, self._servers)
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning is not None and body.reasoning.effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning.effort)
        conversation = Conversation(
            messages=messages, tools=functions, tool_choice=choice, parallel=body.parallel_tool_calls,
            template_kwargs=kwargs,
        )  # fmt: skip
        if body.truncation == "auto":
            conversation = await fitting(self.serving, conversation, body)
        return conversation, items, history, tooling

    def _in_background(self, run: ResponseRun, stored: StoredResponse, body: ResponsesBody) -> Response:
        stored.response["status"] = "queued"
        self._store.add(stored)
        stored.task = asyncio.create_task(self._drain(run, stored))
        if body.stream:
            events: Response = self.serving.http.events(stored.follow(0))
            return events
        return json_response(stored.response)

    async def _drain(self, run: ResponseRun, stored: StoredResponse | None) -> None:
        """Runs to the end; records the events, so that clients can follow a stored response."""
        try:
            async with aclosing(run.frames(self._details)) as frames:
                async for frame in frames:
                    if stored is not None:
                        stored.record(frame)
        finally:
            if stored is not None:
                if stored.running:  # cancelled before it began
                    stored.response["status"] = "cancelled"
                self._settle(stored)
        if stored is None and run.failure is not None:
            raise run.failure

    async def _recorded(self, run: ResponseRun, stored: StoredResponse | None) -> AsyncGenerator[bytes, None]:
        """The events of a stream, recorded where the response is stored."""
        try:
            async with aclosing(run.frames(self._details)) as frames:
                async for frame in frames:
                    if stored is not None:
                        stored.record(frame)
                    yield frame
        finally:
            if stored is not None:
                self._settle(stored)

    def _settle(self, stored: StoredResponse) -> None:
        stored.task = None
        stored.notify()
        self._store.settle(stored)

    async def _count(self, request: Request) -> Response:
        body: InputBody = self.serving.http.parse(request, InputBody)
        self.serving.models.served(body.model)
        conversation, *_ = await self._conversation(body, self.serving.http.owner(request))
        chat = await Reply(self.serving, conversation, body).prompt()
        return json_response({"object": "response.input_tokens", "input_tokens": len(chat.token_ids)})

    async def _retrieve(
        self, request: Request, name: str, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        stored = self._store.get(name, self.serving.http.owner(request))
        if not stream:
            return json_response(stored.response)
        if not stored.recorded:
            raise RequestError(
                400, f"response {quoted(name)} was not created with stream or background", param="stream"
            )
        start = 0 if starting_after is None else max(0, min(starting_after, 1 << 31) + 1)
        events: Response = self.serving.http.events(stored.follow(start))
        return events

    async def _delete(self, request: Request, name: str) -> Response:
        stored = self._store.get(name, self.serving.http.owner(request))
        self._store.drop(stored)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def _cancel(self, request: Request, name: str) -> Response:
        stored = self._store.get(name, self.serving.http.owner(request))
        if not stored.response["background"]:
            raise RequestError(400, f"response {quoted(name)} was not created in the background")
        task = stored.task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if stored.running:  # its task had not begun
                stored.response["status"] = "cancelled"
                self._settle(stored)
        return json_response(stored.response)

    async def _input_items(
        self, request: Request, name: str, after: str = "", limit: int = 20, order: str = "desc"
    ) -> Response:
        stored = self._store.get(name, self.serving.http.owner(request))
        if not 1 <= limit <= _MAX_PAGE:
            raise RequestError(400, f"limit must be from 1 to {_MAX_PAGE}, got {limit}", param="limit")
        items = stored.input_items if order == "asc" else stored.input_items[::-1]
        ids = [item["id"] for item in items]
        start = ids.index(after) + 1 if after in ids else 0
        page = items[start : start + limit]
        return json_response(
            {
                "object": "list",
                "data": [_shown_item(item) for item in page],
                "first_id": page[0]["id"] if page else "",
                "last_id": page[-1]["id"] if page else "",
                "has_more": start + limit < len(items),
            }
        )


def _shown_item(item: Object) -> Object:
    """An input item with its content as a list of parts."""
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: Object = {"type": kind, "text": content}
        if kind == "output_text":
            part["annotations"] = []
        return {"status": "completed", **item, "content": [part]}
    return item
