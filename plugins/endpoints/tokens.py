"""`POST /tokenize` and `POST /detokenize`; `GET /tokenizer_info` with --enable-tokenizer-info-endpoint."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from frame.interfaces import BoundedModel, Endpoint, Name, Text, TokenIds, few

from .json_response import json_response
from .openai_bodies import Message, Object


class TokenizeBody(BoundedModel):
    """Either `prompt`, or `messages` with the options of a chat."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=65536, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Object], Field(max_length=512, fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=64), few(64)] | None = None

    @model_validator(mode="after")
    def _either(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(BoundedModel):
    """Token ids to turn into text."""

    model: Name | None = None
    tokens: TokenIds


class TokensEndpoint(Endpoint):
    """The tokenizer over HTTP."""

    def router(self) -> APIRouter:
        """The routes of the tokenizer."""
        router = APIRouter()
        for path, handler, kind in (
            ("/tokenize", self._tokenize, TokenizeBody),
            ("/detokenize", self._detokenize, DetokenizeBody),
        ):
            schema = {"requestBody": {"content": {"application/json": {"schema": kind.model_json_schema()}}}}
            router.add_api_route(path, handler, methods=["POST"], openapi_extra=schema)
        if self.settings.enable_tokenizer_info_endpoint:
            router.add_api_route("/tokenizer_info", self._info, methods=["GET"])
        return router

    async def _info(self) -> Response:
        """The tokenizer's settings as `tokenizer_config.json` has them, with the chat template that is used."""
        return json_response(self.serving.text.tokenizer_info())

    async def _tokenize(self, request: Request) -> Response:
        body: TokenizeBody = self.serving.http.parse(request, TokenizeBody)
        self.serving.models.served(body.model)
        if body.prompt is not None:
            ids = await self.serving.text.tokenize(body.prompt, body.add_special_tokens)
        else:
            chat = await self.serving.text.chat_prompt(
                [message.model_dump(exclude_unset=True) for message in body.messages or ()],
                chat_template=None,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                tools=body.tools,
                template_kwargs=body.chat_template_kwargs or {},
            )
            ids = [int(token) for token in chat.token_ids]
        texts = None
        if body.return_token_strs:
            texts = [self.serving.text.token_bytes(token).decode(errors="replace") for token in ids]
        return json_response(
            {
                "count": len(ids),
                "max_model_len": self.serving.models.limits.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    async def _detokenize(self, request: Request) -> Response:
        body: DetokenizeBody = self.serving.http.parse(request, DetokenizeBody)
        self.serving.models.served(body.model)
        return json_response({"prompt": await self.serving.text.detokenize(body.tokens)})
