"""One reply of the model in a conversation, for every API that has conversations: from messages to events of output.

Knows no API's format.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frame import RequestOutputKind
from frame.interfaces import OutputEvent, SamplingFields, Serving


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A chat as OpenAI's chat completions have it.

    `tool_choice` is None, "auto", "none", "required" or a named function; `parallel` allows several calls at once.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


@dataclass(frozen=True)
class Piece:
    """What one output of the engine adds to the reply."""

    events: Sequence[OutputEvent]
    token_ids: Sequence[int]
    logprobs: Any
    finish_reason: str | None
    stop_reason: int | str | None


class Reply:
    """Renders a conversation and streams the model's answer to it.

    `body` holds the sampling parameters; `fields` are those that the route sets, as for `Serving.generation.params`.
    Raises `RequestError` when the model cannot call the tools of the conversation.
    """

    def __init__(self, serving: Serving, conversation: Conversation, body: SamplingFields, **fields: Any) -> None:
        self._serving = serving
        self._conversation = conversation
        self._body = body
        self._fields = fields
        self._turn = serving.text.turn(
            tools=list(conversation.tools) or None,
            tool_choice=conversation.tool_choice,
            parallel=conversation.parallel,
            template_kwargs=conversation.template_kwargs,
        )
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        #: what the engine's KV connector says to who asked, with the last piece
        self.kv_transfer_params: dict[str, Any] | None = None

    async def prompt(self) -> Any:
        """The rendered conversation, with `text` and `token_ids`."""
        chat = self._conversation
        return await self._serving.text.chat_prompt(
            [dict(message) for message in chat.messages],
            add_generation_prompt=not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            tools=self._turn.tools,
            template_kwargs=dict(chat.template_kwargs),
        )

    async def run(
        self,
        name: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer: dict[str, Any] | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer as they arrive; closing the generator aborts the request."""
        chat = await self.prompt()
        prompt = {"prompt": chat.text, "prompt_token_ids": chat.token_ids}
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        params = self._serving.generation.params(self._body, output_kind=RequestOutputKind.DELTA, **self._fields)
        params = self._turn.constrain(params, chat.text)
        outputs = self._serving.generation.generate(
            prompt, params, f"{name}-{uuid.uuid4().hex[:8]}", priority=priority, kv_transfer=kv_transfer
        )
        try:
            async for output in outputs:
                self._count(output)
                for completion in output.outputs:
                    yield Piece(
                        self._turn.read(completion),
                        completion.token_ids,
                        completion.logprobs,
                        self._turn.finish_reason(completion),
                        completion.stop_reason,
                    )
        finally:
            await outputs.aclose()

    def num_reasoning_tokens(self) -> int:
        """How many output tokens were reasoning; call it once, after the last piece."""
        count: int = self._turn.num_reasoning_tokens()
        return min(count, self.num_output_tokens)

    def _count(self, output: Any) -> None:
        if output.prompt_token_ids is not None:
            self.num_prompt_tokens = len(output.prompt_token_ids)
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        self.num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
