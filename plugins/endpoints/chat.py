"""`POST /v1/chat/completions`: messages in, a message out."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from frame import RequestOutputKind
from frame.interfaces import Content, Endpoint, EndpointSettings, OutputEvent, Serving

from .chat_embeds import EmbeddedParts
from .chat_messages import delta_of, message_for_template, whole_message
from .json_response import json_response
from .names import response_name
from .openai_answers import (
    DONE,
    Answer,
    ChatChoice,
    Delta,
    DeltaChoice,
    Frames,
    Usage,
    UsageCounter,
)
from .openai_bodies import ChatBody
from .openai_logprobs import ChatLogprobs, TokenTexts, prompt_logprobs

Stream = AsyncGenerator[Any, None]


class ChatEndpoint(Endpoint):
    """OpenAI's chat completions, with tool calls and reasoning as the chosen parsers find them."""

    def router(self) -> APIRouter:
        """`POST /v1/chat/completions`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": ChatBody.model_json_schema()}}}}
        router.add_api_route("/v1/chat/completions", self._create, methods=["POST"], openapi_extra=schema)
        return router

    async def _create(self, request: Request) -> Response:
        body: ChatBody = self.serving.http.parse(request, ChatBody)
        self.serving.models.require("generate")
        answer = _Chat(self.settings, self.serving, body, response_name("chatcmpl", request, body.request_id))
        outputs = await answer.start()
        if not body.stream:
            response: Response = await self.serving.http.race(request, answer.whole(outputs))
            return response
        first = await self.serving.http.race(request, anext(outputs, None))
        events: Response = self.serving.http.events(answer.frames(first, outputs))
        return events


def _piece(index: int, text: str) -> DeltaChoice:
    return DeltaChoice(index, Delta(content=text))


class _Chat:
    """One request: from its body to its response."""

    def __init__(self, settings: EndpointSettings, serving: Serving, body: ChatBody, name: str) -> None:
        self._settings = settings
        self._serving = serving
        self._body = body
        self._model: str = serving.models.served(body.model)
        self._name = name
        self._usage = UsageCounter(settings.enable_prompt_tokens_details)
        self._texts = TokenTexts(
            serving.text.token_bytes, body.return_tokens_as_token_ids or settings.return_tokens_as_token_ids
        )
        messages = [message_for_template(message.model_dump(exclude_unset=True)) for message in body.messages]
        self._embeds = EmbeddedParts(messages)
        self._messages = self._embeds.messages
        last = self._messages[-1]
        self._role = settings.response_role if body.add_generation_prompt else str(last["role"])
        self._turn = serving.text.turn(
            tools=body.tools,
            tool_choice=body.tool_choice,
            parallel=body.parallel_tool_calls is not False,
            include_reasoning=body.include_reasoning,
            template_kwargs=body.chat_template_kwargs,
        )
        self._begun: set[int] = set()
        self._shows_tokens = bool(body.logprobs or body.return_token_ids)
        self._echo = last["content"] if body.echo and isinstance(last.get("content"), str) else ""

    async def start(self) -> Stream:
        """Renders the messages and admits the request."""
        body = self._body
        kwargs = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        chat = await self._serving.text.chat_prompt(
            self._messages,
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=self._turn.tools,
            documents=body.documents,
            template_kwargs=kwargs,
        )
        params = self._serving.generation.params(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_outputs=body.constraint(),
            output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        )
        params = self._turn.constrain(params, chat.text)
        prompt = await self._embeds.prompt(chat, self._serving)
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        name = f"{self._name}-{uuid.uuid4().hex[:8]}"
        stream: Stream = self._serving.generation.generate(
            prompt, params, name, priority=body.priority, kv_transfer=body.kv_transfer_params
        )
        return stream

    async def whole(self, outputs: Stream) -> Response:
        """The whole answer in one response."""
        body, serving = self._body, self._serving
        choices: list[ChatChoice] = []
        usage, now = self._usage.usage(), int(time.time())
        answer = Answer(self._name, "chat.completion", now, self._model, choices, usage, serving.models.fingerprint)
        try:
            async for output in outputs:
                self._usage.see(0, output)
                for completion in output.outputs:
                    self._turn.read(completion)
                    choice = ChatChoice(
                        completion.index,
                        whole_message(self._role, self._echo, self._turn.message(completion.index)),
                        self._logprobs(completion),
                        self._turn.finish_reason(completion),
                        completion.stop_reason,
                    )
                    if body.return_token_ids:
                        choice.token_ids = list(completion.token_ids)
                    choices.append(choice)
                if body.prompt_logprobs is not None:
                    answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                if output.kv_transfer_params is not None:
                    answer.kv_transfer_params = output.kv_transfer_params
                if body.return_token_ids:
                    answer.prompt_token_ids = list(output.prompt_token_ids or ())
        finally:
            await outputs.aclose()
        choices.sort(key=lambda choice: choice.index)
        answer.usage = self._final_usage()
        if body.return_timing:
            answer.timing = self._usage.timing()
        return json_response(answer)

    async def frames(self, first: Any, outputs: Stream) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events: for each choice the role, then its new output."""
        body, serving = self._body, self._serving
        options = body.stream_options
        with_usage = self._settings.enable_force_include_usage or (options is not None and options.include_usage)
        continuous = options is not None and options.continuous_usage_stats
        frames = Frames(
            self._name,
            "chat.completion.chunk",
            int(time.time()),
            self._model,
            serving.models.fingerprint,
            with_usage,
            _piece,
        )
        try:
            output = first
            while output is not None:
                self._usage.see(0, output)
                usage = self._usage.usage() if continuous else None
                if len(output.outputs) == 1:
                    yield self._frame(frames, output.outputs[0], usage)
                else:
                    yield b"".join([self._frame(frames, completion, usage) for completion in output.outputs])
                output = await anext(outputs, None)
        finally:
            await outputs.aclose()
        timing = self._usage.timing() if body.return_timing else None
        yield frames.last(self._final_usage() if with_usage else None, timing) + DONE

    def _frame(self, frames: Frames, completion: Any, usage: Usage | None) -> bytes:
        """The events of a completion's new output: the role first; nothing while the parsers hold the text back."""
        opening = b""
        if completion.index not in self._begun:
            self._begun.add(completion.index)
            opening = frames.choice(DeltaChoice(completion.index, Delta(self._role, self._echo)), usage)
        events = self._turn.read(completion)
        text = None if usage is not None else self._only_text(completion, events)
        if text is not None:
            frame = frames.text(completion.index, text)
            return opening + frame if opening else frame
        choice = self._delta(completion, events)
        return opening if choice is None else opening + frames.choice(choice, usage)

    def _only_text(self, completion: Any, events: list[OutputEvent]) -> str | None:
        """The new text where a completion adds nothing but text; None otherwise."""
        if completion.finish_reason is not None or len(events) != 1 or self._shows_tokens:
            return None
        event = events[0]
        return event.text if type(event) is Content and event.text else None

    def _delta(self, completion: Any, events: list[OutputEvent]) -> DeltaChoice | None:
        """What a completion adds; None when the parsers hold all of it back."""
        body = self._body
        if not (events or completion.finish_reason or body.logprobs or body.return_token_ids):
            return None
        return DeltaChoice(
            completion.index,
            delta_of(events),
            self._logprobs(completion),
            self._turn.finish_reason(completion),
            completion.stop_reason,
            list(completion.token_ids) if body.return_token_ids else UNSET,
        )

    def _final_usage(self) -> Usage:
        reasoning = self._turn.num_reasoning_tokens()
        return self._usage.usage(reasoning or None)

    def _logprobs(self, completion: Any) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._texts.chat(completion.token_ids, completion.logprobs or (), self._body.top_logprobs or 0)
