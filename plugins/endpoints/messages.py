"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's conversations."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from frame.anthropic_errors import AnthropicErrors, event
from frame.interfaces import Endpoint, EndpointSettings, Serving

from .anthropic_answers import Blocks, stop_fields
from .anthropic_bodies import ConversationBody, MessagesBody
from .anthropic_chats import read_conversation
from .json_response import json_response
from .replies import Piece, Reply


class MessagesEndpoint(Endpoint):
    """Anthropic's messages, at once or as events."""

    errors = AnthropicErrors()

    def router(self) -> APIRouter:
        """Both routes."""
        router = APIRouter()
        for path, handler, kind in (
            ("/v1/messages", self._create, MessagesBody),
            ("/v1/messages/count_tokens", self._count, ConversationBody),
        ):
            schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
            router.add_api_route(path, handler, methods=["POST"], openapi_extra=schema)
        return router

    async def _create(self, request: Request) -> Response:
        body: MessagesBody = self.serving.http.parse(request, MessagesBody)
        self.serving.models.require("generate")
        answer = _Answer(self.settings, self.serving, body)
        pieces = answer.start()
        if not body.stream:
            response: Response = await self.serving.http.race(request, answer.whole(pieces))
            return response
        first = await self.serving.http.race(request, anext(pieces, None))
        events: Response = self.serving.http.events(answer.frames(first, pieces))
        return events

    async def _count(self, request: Request) -> Response:
        body: ConversationBody = self.serving.http.parse(request, ConversationBody)
        self.serving.models.served(body.model)
        chat = await Reply(self.serving, read_conversation(body), body).prompt()
        return json_response({"input_tokens": len(chat.token_ids)})


class _Answer:
    """One request: from its body to its response."""

    def __init__(self, settings: EndpointSettings, serving: Serving, body: MessagesBody) -> None:
        self._body = body
        self._model: str = serving.models.served(body.model)
        self._name = f"msg_{uuid.uuid4().hex}"
        self._details = settings.enable_prompt_tokens_details
        self._blocks = Blocks()
        self._last: Piece | None = None
        stops = [*(body.stop_sequences or ()), *([body.stop] if isinstance(body.stop, str) else body.stop or ())]
        self._reply = Reply(
            serving,
            read_conversation(body),
            body,
            max_tokens=body.max_tokens,
            stop=stops or None,
            n=1,
            structured_outputs=body.constraint(),
        )

    def start(self) -> AsyncGenerator[Piece, None]:
        """Renders the conversation and admits the request with the first piece."""
        body = self._body
        return self._reply.run(
            self._name, priority=body.priority, cache_salt=body.cache_salt, kv_transfer=body.kv_transfer_params
        )

    async def whole(self, pieces: AsyncGenerator[Piece, None]) -> Response:
        """The whole answer in one response."""
        async for piece in pieces:
            self._see(piece)
        self._blocks.finish()
        answer = {**self._message(self._blocks.content), **self._ending(), "usage": self._final_usage()}
        if self._reply.kv_transfer_params is not None:
            answer["kv_transfer_params"] = self._reply.kv_transfer_params
        return json_response(answer)

    async def frames(self, first: Piece | None, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
        """The response as events."""
        try:
            yield event("message_start", message=self._message([]))
            yield event("ping")
            piece = first
            while piece is not None:
                for frame in self._see(piece):
                    yield frame
                piece = await anext(pieces, None)
            for frame in self._blocks.finish():
                yield frame
        finally:
            await pieces.aclose()
        yield event("message_delta", delta=self._ending(), usage=self._final_usage())
        yield event("message_stop")

    def _see(self, piece: Piece) -> list[bytes]:
        frames = self._blocks.feed(piece.events)
        if piece.finish_reason is not None:
            self._last = piece
        return frames

    def _ending(self) -> dict[str, Any]:
        if self._last is None:
            return stop_fields(None, None, False)
        return stop_fields(self._last.finish_reason, self._last.stop_reason, self._blocks.called)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        edited: dict[str, Any] = (
            {} if self._body.context_management is None else {"context_management": {"applied_edits": []}}
        )
        return {
            **edited,
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _final_usage(self) -> dict[str, Any]:
        thinking = self._reply.num_reasoning_tokens()
        return {**self._usage(), **({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {})}

    def _usage(self) -> dict[str, int]:
        """With --enable-prompt-tokens-details, cached tokens are counted apart from `input_tokens`."""
        reply = self._reply
        usage = {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_output_tokens}
        if self._details:
            usage["input_tokens"] -= reply.num_cached_tokens
            usage.update(cache_read_input_tokens=reply.num_cached_tokens, cache_creation_input_tokens=0)
        return usage
