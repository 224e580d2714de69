"""Reads prompts of every form into `ParsedPrompt`. Knows no tokenizer and no model."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from frame.links.encoder_prompts import NO_ENCODER as NO_ENCODER, has_sides, read_sides
from frame.links.prompt_embeds import placed
from frame.quoting import quoted

from ..interfaces.engine import PromptEmbeds
from ..interfaces.errors import InvalidRequest as InvalidRequest

#: A rule of thumb for text, with which prompts are counted before they are tokenised.
BYTES_PER_TOKEN = 4

_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")
_NOT_SERVED = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "token_type_ids")


class ParsedPrompt(msgspec.Struct, frozen=True, eq=False):
    """One prompt: `text`, or `token_ids` [n] int64 or int32, perhaps read-only, or both (then the ids count).

    `second_segment` is where the second text of a pair begins, -1 where there is one text. `listed` holds the same ids
    as a list where the caller passed a list, since copying it is faster than converting the array. `embeds` stand where
    the ids are NO_TOKEN. Where there is an `encoder` prompt, the rest is what the decoder begins with.
    """

    text: str | None = None
    token_ids: np.ndarray | None = None
    salt: str | None = None
    second_segment: int = -1
    listed: list[int] | None = None
    embeds: PromptEmbeds | None = None
    encoder: ParsedPrompt | None = None

    @property
    def ids(self) -> list[int]:
        """The ids as a list of the caller's own; empty when there is only text."""
        if self.listed is not None:
            return self.listed.copy()
        return [] if self.token_ids is None else self.token_ids.tolist()

    def cut(self, keep: int) -> ParsedPrompt:
        """The prompt with its last `keep` ids."""
        if self.token_ids is None or len(self.token_ids) <= keep:
            return self
        listed = None if self.listed is None else self.listed[-keep:]
        return msgspec.structs.replace(self, token_ids=self.token_ids[-keep:], listed=listed)


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Reads any form of prompt without changing it; raises `InvalidRequest`."""
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return read_sides(prompt, parse_prompt) if has_sides(prompt) else _parse_mapping(prompt)
    return _of_ids(None, prompt, None)


def about_tokens(prompt: Any) -> int:
    """How many tokens a prompt of any valid form has; of a text that is not tokenised yet, as its bytes suggest."""
    parsed = parse_prompt(prompt)
    encoded = 0 if parsed.encoder is None else about_tokens(parsed.encoder)
    if parsed.token_ids is not None:
        return encoded + len(parsed.token_ids)
    return encoded + len((parsed.text or "").encode()) // BYTES_PER_TOKEN


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key in prompt:
        if key in _KEYS:
            continue
        if key not in _NOT_SERVED:
            raise InvalidRequest(f"no prompt field {quoted(key)}; there are: {', '.join(_KEYS)}", "prompt")
        if not _is_empty(prompt[key]):
            raise InvalidRequest(f"prompt field {quoted(key)} is not served; there are: {', '.join(_KEYS)}", "prompt")
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    embeds = prompt.get("prompt_embeds")
    if text is None and ids is None and embeds is None:
        raise InvalidRequest("a prompt needs 'prompt', 'prompt_token_ids' or 'prompt_embeds'", "prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"'prompt' must be text, got {type(text).__name__}", "prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequest(f"'cache_salt' must be a non-empty string, got {quoted(salt)}", "cache_salt")
    if embeds is not None:
        given, found = placed(embeds, None if ids is None else _read_ids(ids))
        return ParsedPrompt(text, given, salt, embeds=found)
    return ParsedPrompt(text=text, salt=salt) if ids is None else _of_ids(text, ids, salt)


def _is_empty(value: Any) -> bool:
    """Whether a field is unset or empty; tensors and arrays count as set, since their truth value is not defined."""
    return value is None or (isinstance(value, (Mapping, Sequence)) and not value)


def _of_ids(text: str | None, ids: Any, salt: str | None) -> ParsedPrompt:
    """A prompt with ids; plain lists take a fast path."""
    if type(ids) is list:
        try:
            listed = msgspec.convert(ids, list[int])  # copies a list of nothing but integers, in which no bool counts
            array = np.frombuffer(struct.pack(f"{len(listed)}i", *listed), np.int32)
            return ParsedPrompt(text, array, salt, listed=listed)
        except (msgspec.ValidationError, struct.error, ValueError):
            pass  # numpy integers, or a wrong value that the error must name
    return ParsedPrompt(text, _read_ids(ids), salt)


def _read_ids(ids: Any) -> np.ndarray:
    """The ids as int64 [n], copied; refuses anything that is not a flat sequence of whole numbers."""
    if isinstance(ids, np.ndarray) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        found = f"{ids.dtype} of {ids.ndim} dimensions"
        raise InvalidRequest(f"prompt token ids must be a flat array of integers, got {found}", "prompt")
    if not isinstance(ids, (Sequence, np.ndarray)) or isinstance(ids, (str, bytes, bytearray, memoryview)):
        raise InvalidRequest(
            f"a prompt must be text, token ids or a dict of either, got {type(ids).__name__}", "prompt"
        )
    if isinstance(ids, np.ndarray) and ids.dtype != np.uint64:
        return ids.astype(np.int64)
    for place, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)):
            raise InvalidRequest(f"prompt token ids must be integers, got {quoted(value)} at {place}", "prompt")
        if not isinstance(value, (int, np.integer)) or not -(2**63) <= value < 2**63:
            raise InvalidRequest(
                f"prompt token ids must be a flat list of 64-bit integers, got {quoted(value)} at {place}", "prompt"
            )
    return np.array(ids, np.int64)
