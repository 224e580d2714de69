"""`POST /v1/completions`: text or token ids in, text out."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET

from frame import RequestOutputKind
from frame.interfaces import Endpoint, EndpointSettings, Serving

from .json_response import json_response
from .merging import merge
from .names import response_name
from .openai_answers import (
    DONE,
    Answer,
    Frames,
    TextChoice,
    UsageCounter,
)
from .openai_bodies import CompletionBody
from .openai_logprobs import TextLogprobs, TextPlace, TokenTexts, prompt_logprobs

Stream = AsyncGenerator[tuple[int, Any], None]


class CompletionsEndpoint(Endpoint):
    """OpenAI's text completions."""

    def router(self) -> APIRouter:
        """`POST /v1/completions`."""
        router = APIRouter()
        schema = {"requestBody": {"content": {"application/json": {"schema": CompletionBody.model_json_schema()}}}}
        router.add_api_route("/v1/completions", self._create, methods=["POST"], openapi_extra=schema)
        return router

    async def _create(self, request: Request) -> Response:
        body: CompletionBody = self.serving.http.parse(request, CompletionBody)
        self.serving.models.require("generate")
        answer = _Completion(self.settings, self.serving, body, response_name("cmpl", request, body.request_id))
        outputs = await answer.start()
        if not body.stream:
            response: Response = await self.serving.http.race(request, answer.whole(outputs))
            return response
        first = await self.serving.http.race(request, anext(outputs, None))
        events: Response = self.serving.http.events(answer.frames(first, outputs))
        return events


class _Completion:
    """One request: from its body to its response."""

    def __init__(self, settings: EndpointSettings, serving: Serving, body: CompletionBody, name: str) -> None:
        self._settings = settings
        self._serving = serving
        self._body = body
        self._model: str = serving.models.served(body.model)
        self._n = body.n or 1
        self._only_echo = body.max_tokens == 0
        self._name = name
        self._best_of = max(self._n, body.best_of or 0)
        self._usage = UsageCounter(settings.enable_prompt_tokens_details)
        self._texts = TokenTexts(
            serving.text.token_bytes, body.return_tokens_as_token_ids or settings.return_tokens_as_token_ids
        )
        self._places: defaultdict[int, TextPlace] = defaultdict(TextPlace)
        self._begun: set[int] = set()

    async def start(self) -> Stream:
        """Admits all prompts, as one stream of (prompt number, output)."""
        body = self._body
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        echoed_logprobs = body.logprobs if body.echo else None
        params = self._serving.generation.params(
            body,
            max_tokens=body.max_tokens or (1 if self._only_echo else 16),
            logprobs=0 if body.logprobs is None and self._best_of > self._n else body.logprobs,
            n=self._best_of,
            prompt_logprobs=body.prompt_logprobs if body.prompt_logprobs is not None else echoed_logprobs,
            structured_outputs=body.constraint(),
            output_kind=kind,
        )
        prompts: list[dict[str, Any]] = [{"prompt_embeds": embeds, **self._salt()} for embeds in body.embeds()]
        prompts += [await self._prompt(prompt) for prompt in body.prompts()]
        unique = uuid.uuid4().hex[:8]
        return merge(
            [
                self._serving.generation.generate(
                    prompt,
                    params,
                    f"{self._name}-{unique}-{number}",
                    priority=body.priority,
                    kv_transfer=body.kv_transfer_params,
                )
                for number, prompt in enumerate(prompts)
            ]
        )

    def _salt(self) -> dict[str, Any]:
        return {} if self._body.cache_salt is None else {"cache_salt": self._body.cache_salt}

    async def _prompt(self, prompt: str | list[int]) -> dict[str, Any]:
        fields = self._salt()
        if isinstance(prompt, list):
            return {"prompt_token_ids": prompt, **fields}
        if self._body.add_special_tokens is False:
            fields["prompt_token_ids"] = await self._serving.text.tokenize(prompt, False)
        return {"prompt": prompt, **fields}

    async def whole(self, outputs: Stream) -> Response:
        """The whole answer in one response."""
        choices: list[TextChoice] = []
        usage, now = self._usage.usage(), int(time.time())
        answer = Answer(
            self._name, "text_completion", now, self._model, choices, usage, self._serving.models.fingerprint
        )
        try:
            async for number, output in outputs:
                await self._see(number, output)
                self._keep_best(output)
                choices += [self._choice(number, output, completion) for completion in output.outputs]
                if output.kv_transfer_params is not None:
                    answer.kv_transfer_params = output.kv_transfer_params
        finally:
            await outputs.aclose()
        choices.sort(key=lambda choice: choice.index)
        answer.usage = self._usage.usage()
        if self._body.return_timing:
            answer.timing = self._usage.timing()
        return json_response(answer)

    def _keep_best(self, output: Any) -> None:
        """With best_of above n: keeps the n completions of highest mean log-probability, best first."""
        if self._best_of == self._n:
            return
        ranked = sorted(
            output.outputs, key=lambda each: -(each.cumulative_logprob or 0.0) / max(1, len(each.token_ids))
        )
        output.outputs = ranked[: self._n]
        for index, completion in enumerate(output.outputs):
            completion.index = index

    async def frames(self, first: tuple[int, Any] | None, outputs: Stream) -> AsyncGenerator[bytes, None]:
        """The response as events."""
        options = self._body.stream_options
        with_usage = self._settings.enable_force_include_usage or (options is not None and options.include_usage)
        continuous = options is not None and options.continuous_usage_stats
        serving, body = self._serving, self._body
        plain = not continuous and body.logprobs is None and not body.return_token_ids
        frames = Frames(
            self._name,
            "text_completion",
            int(time.time()),
            self._model,
            serving.models.fingerprint,
            with_usage,
            TextChoice,
        )
        try:
            while first is not None:
                number, output = first
                await self._see(number, output)
                found = []
                for completion in output.outputs:
                    index = number * self._n + completion.index
                    if plain and completion.finish_reason is None and index in self._begun:
                        found.append(frames.text(index, completion.text))
                        continue
                    choice = self._choice(number, output, completion)
                    found.append(frames.choice(choice, self._usage.usage() if continuous else None))
                yield found[0] if len(found) == 1 else b"".join(found)
                first = await anext(outputs, None)
        finally:
            await outputs.aclose()
        timing = self._usage.timing() if self._body.return_timing else None
        yield frames.last(self._usage.usage() if with_usage else None, timing) + DONE

    async def _see(self, number: int, output: Any) -> None:
        if self._only_echo:
            for completion in output.outputs:
                completion.token_ids, completion.text, completion.logprobs = [], "", None
                completion.finish_reason, completion.stop_reason = "length", None
        if self._body.echo and output.prompt is None and output.prompt_token_ids is not None:
            output.prompt = await self._serving.text.detokenize(list(output.prompt_token_ids))
        self._usage.see(number, output)

    def _choice(self, number: int, output: Any, completion: Any) -> TextChoice:
        body = self._body
        index = number * self._n + completion.index
        begins = index not in self._begun
        self._begun.add(index)
        echo = (output.prompt or "") if body.echo and begins else ""
        choice = TextChoice(index, echo + completion.text, None, completion.finish_reason, completion.stop_reason)
        if body.logprobs is not None:
            choice.logprobs = self._logprobs(output, completion, self._places[index], echo)
        if body.prompt_logprobs is not None and begins:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice.token_ids = list(completion.token_ids)
            choice.prompt_token_ids = list(output.prompt_token_ids or ()) if begins else UNSET
        return choice

    def _logprobs(self, output: Any, completion: Any, place: TextPlace, echo: str) -> TextLogprobs:
        top = self._body.logprobs or 0
        answer = TextLogprobs([], [], [], [])
        if echo:
            place.enter_prompt(echo)
            if output.prompt_logprobs is not None:
                answer = self._texts.text(output.prompt_token_ids, output.prompt_logprobs, top, place)
            place.leave_prompt()
        drawn = self._texts.text(completion.token_ids, completion.logprobs or (), top, place)
        for name in TextLogprobs.__struct_fields__:
            getattr(answer, name).extend(getattr(drawn, name))
        return answer
