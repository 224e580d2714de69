"""Tokenising, detokenising and chat templates for routes."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from ..front.turn import AssistantTurn
from ..interfaces.errors import RequestError
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.tokenizer import ChatOptions
from .errors import refusals

if TYPE_CHECKING:
    from ..front.template_process import TemplateProcesses
    from .serving import ServingHost


class FrontTexts:
    """Implements `frame.interfaces.Texts` over the front of a host.

    Templates that requests bring are rendered in child processes.
    """

    def __init__(self, host: ServingHost) -> None:
        self._host = host

    @cached_property
    def _isolated(self) -> TemplateProcesses | None:
        config = self._host.config
        if not (config.server.trust_request_chat_template or config.server.isolate_chat_template):
            return None
        from ..front.template_process import TemplateProcesses

        return TemplateProcesses(config, self._host.llm.front.source.registry.choices(config))

    def close(self) -> None:
        """Ends the processes."""
        if (isolated := self.__dict__.get("_isolated")) is not None:
            isolated.close()

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with refusals():
            return await self._host.llm.tokenize(text, add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        vocab_size = self._host.limits.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(400, f"token id must be in [0, {vocab_size}), got {wrong}", param="tokens")
        with refusals():
            return await asyncio.to_thread(self._host.llm.front.source.get().decode, token_ids, False)

    def tokenizer_info(self) -> dict[str, Any]:
        with refusals():
            front = self._host.llm.front
            settings = front.source.get().describe()
            return settings if front.chat_template is None else {**settings, "chat_template": front.chat_template}

    def token_bytes(self, token_id: int) -> bytes:
        tokenizer = self._host.llm.front.source.get_or_none()
        if tokenizer is None:  # there is no text, so clients get the id in its place
            return f"token_id:{token_id}".encode()
        return tokenizer.token_bytes(token_id)

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        template = options.get("chat_template")
        if template is not None and "{{" not in template and "{%" not in template:
            raise RequestError(400, "chat_template must be a template, not a file", param="chat_template")
        with refusals():
            chat, front = ChatOptions(**options), self._host.llm.front
            if self._isolated is not None and (template is not None or self._host.config.server.isolate_chat_template):
                return await self._isolated.render(messages, front.with_template(chat), front.longest_chat)
            return await self._host.llm.render_chat(messages, chat)

    async def pair(self, first: str, second: str, params: PoolingParams, cache_salt: str | None = None) -> Any:
        with refusals():
            return msgspec.structs.replace(await self._host.llm.pair(first, second, params), salt=cache_salt)

    def turn(self, **options: Any) -> AssistantTurn:
        return self._host.parsers.turn(**options)
