"""The types of prompts that `LLM` takes, one or several in one argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np

from frame.core.front.prompts import ParsedPrompt
from frame.core.interfaces.errors import InvalidRequest


class TextPrompt(TypedDict):
    """Text, tokenised with the tokenizer's special tokens. `cache_salt` keeps its prefix-cache blocks apart."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, used as they are; `prompt` is only echoed."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Embeddings [n, hidden size] of float32, float16 or bfloat16 in the place of tokens.

    They are what the model's first layer gets: a model that scales its embeddings does not scale these. Where there are
    `prompt_token_ids`, each -1 among them stands for all rows of the next of several tensors. `prompt` is only echoed.
    """

    prompt_embeds: Any
    prompt_token_ids: NotRequired[Sequence[int]]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EncoderDecoderPrompt(TypedDict):
    """What the encoder reads and, behind the token with which every decoder begins, what the decoder goes on with."""

    encoder_prompt: str | TextPrompt | TokensPrompt | Sequence[int]
    decoder_prompt: NotRequired[str | TextPrompt | TokensPrompt | Sequence[int] | None]


PromptType: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt | EncoderDecoderPrompt | Sequence[int]


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
