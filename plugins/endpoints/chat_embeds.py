"""Content parts of a chat that are embeddings: they go where the chat template puts a text that stands for each.

`{"type": "prompt_embeds", "data": safetensors bytes as base64}`. Knows no tensor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from frame.interfaces import RequestError, Serving

_TYPE = "prompt_embeds"
#: The id that stands for the rows of a tensor in `prompt_token_ids`.
_HERE = -1


class EmbeddedParts:
    """The parts of `messages` that are embeddings, and in `messages` a text that nobody can guess in their place."""

    def __init__(self, messages: Sequence[dict[str, Any]]) -> None:
        self._data: list[str] = []
        self._mark = f"<embeds-{secrets.token_hex(16)}>"
        self.messages = [self._replaced(message) for message in messages]

    async def prompt(self, chat: Any, serving: Serving) -> dict[str, Any]:
        """The prompt of a rendered chat."""
        prompt = {"prompt": chat.text, "prompt_token_ids": chat.token_ids}
        if not self._data:
            return prompt
        texts = (chat.text or "").split(self._mark)
        if len(texts) != len(self._data) + 1:
            raise RequestError(
                400,
                f"the chat template shows {len(texts) - 1} of {len(self._data)} prompt_embeds; each must be there once",
                param="messages",
            )
        ids: list[int] = []
        for number, text in enumerate(texts):
            ids += [_HERE] * (number > 0)
            ids += await serving.text.tokenize(text, False) if text else []
        return {"prompt": "".join(texts), "prompt_token_ids": ids, "prompt_embeds": self._data}

    def _replaced(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list) or not any(_is_embeds(part) for part in content):
            return message
        return {**message, "content": [self._marked(part) if _is_embeds(part) else part for part in content]}

    def _marked(self, part: dict[str, Any]) -> dict[str, Any]:
        data = part.get("data")
        if not isinstance(data, str):
            raise RequestError(
                400, "a prompt_embeds part needs 'data', safetensors bytes as base64 text", param="messages"
            )
        self._data.append(data)
        return {"type": "text", "text": self._mark}


def _is_embeds(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == _TYPE
