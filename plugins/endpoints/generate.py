"""`POST /inference/v1/generate`: token ids in and out, for front ends that have the tokenizer (`--tokens-only`)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field, ValidationInfo, field_validator

from frame import RequestOutputKind
from frame.interfaces import (
    MAX_INT,
    MAX_TOKEN_LIST,
    BoundedModel,
    Endpoint,
    EndpointSettings,
    Name,
    SamplingFields,
    Serving,
    TokenId,
    bound_logprobs,
    limits_of,
)

from .json_response import json_response
from .names import response_name
from .openai_answers import DONE, Usage, UsageCounter
from .openai_logprobs import ChatLogprobs, TokenTexts, prompt_logprobs
from .transfer_params import TransferParams

Stream = AsyncGenerator[Any, None]


class GenerateSampling(SamplingFields):
    """How tokens are drawn: the fields of `SamplingParams`, as they are called there."""

    not_served: ClassVar[Mapping[str, str]] = {
        "stop": "there is no tokenizer that would read it; give stop_token_ids",
        "bad_words": "there is no tokenizer that would read them; give logit_bias",
        "structured_outputs": "there is no tokenizer that would read the text",
    }

    max_tokens: int | None = Field(16, ge=1, le=MAX_INT)
    logprobs: int | None = Field(None, ge=-1, le=MAX_INT)

    @field_validator("logprobs")
    @classmethod
    def _bound_logprobs_of_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        return bound_logprobs(value, info)


class GenerateBody(BoundedModel):
    """`POST /inference/v1/generate`."""

    not_served: ClassVar[Mapping[str, str]] = {"features": "models take text only"}

    model: Name | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_LIST, fail_fast=True)]
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    stream: bool = False
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_transfer_params: TransferParams | None = None

    @field_validator("token_ids")
    @classmethod
    def _bound_ids(cls, value: list[int], info: ValidationInfo) -> list[int]:
        limits = limits_of(info)
        if limits is not None and max(value) >= limits.vocab_size:
            raise ValueError(f"must be below {limits.vocab_size}, the size of the vocabulary, got {max(value)}")
        return value


class TokensChoice(Struct):
    """One output, or in a stream what is new of it."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateAnswer(Struct):
    """A whole response, or an event of a stream; the last event has no choice."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType = UNSET
    prompt_logprobs: Any = UNSET
    kv_transfer_params: Any = UNSET


class GenerateEndpoint(Endpoint):
    """Generates token ids from token ids."""

    modes: ClassVar[frozenset[str]] = frozenset(("tokens",))

    def router(self) -> APIRouter:
        """`POST /inference/v1/generate`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": GenerateBody.model_json_schema()}}}}
        router.add_api_route("/inference/v1/generate", self._generate, methods=["POST"], openapi_extra=schema)
        return router

    async def _generate(self, request: Request) -> Response:
        body: GenerateBody = self.serving.http.parse(request, GenerateBody)
        self.serving.models.require("generate")
        self.serving.models.served(body.model)
        name = response_name("generate", request, body.request_id)
        answer = _Generation(self.settings, self.serving, body, name)
        outputs = answer.start()
        if not body.stream:
            response: Response = await self.serving.http.race(request, answer.whole(outputs))
            return response
        events: Response = self.serving.http.events(answer.frames(outputs))
        return events


class _Generation:
    """One request: from its body to its response."""

    def __init__(self, settings: EndpointSettings, serving: Serving, body: GenerateBody, name: str) -> None:
        self._serving = serving
        self._body = body
        self._name = name
        self._usage = UsageCounter(settings.enable_prompt_tokens_details)
        self._texts = TokenTexts(lambda token: f"token_id:{token}".encode(), as_ids=True)

    def start(self) -> Stream:
        """The outputs as they come; closing them aborts the request."""
        body, sampling = self._body, self._body.sampling_params
        params = self._serving.generation.params(
            sampling,
            logprobs=sampling.logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": body.token_ids}
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        stream: Stream = self._serving.generation.generate(
            prompt,
            params,
            f"{self._name}-{uuid.uuid4().hex[:8]}",
            priority=body.priority,
            kv_transfer=body.kv_transfer_params,
        )
        return stream

    async def whole(self, outputs: Stream) -> Response:
        """The whole answer in one response."""
        answer = GenerateAnswer(self._name, [])
        try:
            async for output in outputs:
                self._read(output, answer)
        finally:
            await outputs.aclose()
        answer.choices.sort(key=lambda choice: choice.index)
        answer.usage = self._usage.usage()
        return json_response(answer)

    async def frames(self, outputs: Stream) -> AsyncGenerator[bytes, None]:
        """The response as events; the last one has the usage."""
        first = True
        try:
            async for output in outputs:
                answer = GenerateAnswer(self._name, [])
                self._read(output, answer, with_prompt=first)
                first = False
                yield _event(answer)
        finally:
            await outputs.aclose()
        yield _event(GenerateAnswer(self._name, [], self._usage.usage())) + DONE

    def _read(self, output: Any, answer: GenerateAnswer, with_prompt: bool = True) -> None:
        """Adds an output of the engine to `answer`."""
        self._usage.see(0, output)
        answer.choices += [self._choice(completion) for completion in output.outputs]
        if with_prompt and self._body.sampling_params.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if output.kv_transfer_params is not None:
            answer.kv_transfer_params = output.kv_transfer_params

    def _choice(self, completion: Any) -> TokensChoice:
        token_ids = list(completion.token_ids)
        choice = TokensChoice(completion.index, token_ids, None, completion.finish_reason, completion.stop_reason)
        top = self._body.sampling_params.logprobs
        if top is not None:
            choice.logprobs = self._texts.chat(token_ids, completion.logprobs or (), top)
        return choice


def _event(answer: GenerateAnswer) -> bytes:
    return b"data: " + msgspec.json.encode(answer) + b"\n\n"
