"""What a caller may pass as a prompt, and its one normal form. Knows no tokenizer and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np


class InvalidRequest(ValueError):
    """A request that cannot be served as it is; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TextPrompt(TypedDict):
    """Text, tokenised with the tokenizer's special tokens. `cache_salt` keeps its prefix-cache blocks apart."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, used as they are; `prompt` is only echoed."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType: TypeAlias = str | TextPrompt | TokensPrompt | Sequence[int]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_NOT_SERVED = ("prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "token_type_ids")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """One prompt: `text`, or `token_ids` [n] int64, or both (then the ids count).

    `second_segment` is where the second text of a pair begins, -1 where there is one text.
    """

    text: str | None = None
    token_ids: np.ndarray | None = None
    salt: str | None = None
    second_segment: int = -1

    @property
    def ids(self) -> list[int]:
        """The ids as a list; empty when there is only text."""
        return [] if self.token_ids is None else self.token_ids.tolist()


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Reads any form of prompt without changing it; raises `InvalidRequest`."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    return ParsedPrompt(token_ids=_read_ids(prompt))


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key in prompt:
        if key in _NOT_SERVED and prompt[key]:
            raise InvalidRequest(f"prompt field {key!r} is not served; there are: {', '.join(_KEYS)}", "prompt")
        if key not in _KEYS and key not in _NOT_SERVED:
            raise InvalidRequest(f"no prompt field {key!r}; there are: {', '.join(_KEYS)}", "prompt")
    text, ids, salt = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise InvalidRequest("a prompt needs 'prompt' or 'prompt_token_ids'", "prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"'prompt' must be text, got {type(text).__name__}", "prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest(f"'cache_salt' must be a non-empty string, got {salt!r}", "cache_salt")
    return ParsedPrompt(text=text, token_ids=None if ids is None else _read_ids(ids), salt=salt)


def _read_ids(ids: Any) -> np.ndarray:
    """The ids as int64 [n], copied; refuses anything that is not a flat sequence of whole numbers."""
    if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes)):
        raise InvalidRequest(
            f"a prompt must be text, token ids or a dict of either, got {type(ids).__name__}", "prompt"
        )
    if len(ids) == 0:
        return np.zeros(0, np.int64)
    try:
        array = np.array(ids)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"prompt token ids must be a flat list of integers: {error}", "prompt") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        wrong = next((value for value in ids if not isinstance(value, (int, np.integer)) or value is True), ids[0])
        raise InvalidRequest(f"prompt token ids must be a flat list of 64-bit integers, got {wrong!r}", "prompt")
    if any(value is True or value is False for value in ids[:2]):
        raise InvalidRequest(f"prompt token ids must be integers, got {ids[0]!r}", "prompt")
    return array.astype(np.int64)


def as_prompts(prompts: Any) -> list[Any]:
    """A single prompt of any form, or a sequence of prompts, as a list of prompts."""
    if isinstance(prompts, (str, Mapping, ParsedPrompt)):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequest(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", "prompt")
    if prompts and isinstance(prompts[0], (int, np.integer)):
        return [prompts]
    return list(prompts)
