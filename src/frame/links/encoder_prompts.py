"""Prompts of models with an encoder and a decoder: which side gets what, and with which ids the decoder begins.

A plain prompt is the encoder's. {"encoder_prompt": …, "decoder_prompt": …} gives each side a prompt of any form. Knows
no tokenizer and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from frame.core.interfaces.errors import InvalidRequest
from frame.quoting import quoted

if TYPE_CHECKING:
    from frame.core.front.prompts import ParsedPrompt

T = TypeVar("T")

_ENCODER, _DECODER = "encoder_prompt", "decoder_prompt"
NO_ENCODER = f"the model has no encoder, so its prompts have no {_ENCODER!r}: give text or token ids alone"
NO_CHAT = "chats are not for a model with an encoder and a decoder: send what its encoder is to read as a completion"


def has_sides(prompt: Mapping[str, Any]) -> bool:
    """Whether a prompt names its sides."""
    return _ENCODER in prompt or _DECODER in prompt


def read_sides(prompt: Mapping[str, Any], parse: Callable[[Any], ParsedPrompt]) -> ParsedPrompt:
    """The decoder's part of a prompt that names its sides, with the encoder's in it. Raises `InvalidRequest`."""
    if wrong := [key for key in prompt if key not in (_ENCODER, _DECODER)]:
        raise InvalidRequest(
            f"no field {wrong[0]!r} in a prompt with {_ENCODER!r}; there are: {_ENCODER}, {_DECODER}", "prompt"
        )
    if prompt.get(_ENCODER) is None:
        raise InvalidRequest(f"a prompt with {_DECODER!r} needs its {_ENCODER!r}", _ENCODER)
    for name in (_ENCODER, _DECODER):
        part = prompt.get(name)
        if isinstance(part, Mapping) and (has_sides(part) or part.get("prompt_embeds") is not None):
            raise InvalidRequest(f"{quoted(name)} must be text, token ids, or a prompt of either", name)
    encoder, begun = _of_side(_ENCODER, parse, prompt[_ENCODER]), prompt.get(_DECODER)
    decoder = type(encoder)() if begun is None else _of_side(_DECODER, parse, begun)
    return msgspec.structs.replace(decoder, encoder=encoder, salt=decoder.salt or encoder.salt)


def decoder_start(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int | None]:
    """(the id that every decoder prompt begins with, the one that follows where nothing else does; None: none).

    Raises `InvalidRequest` where neither generation_config.json nor config.json says it.
    """
    given = {name: value for part in (config, generation) for name, value in part.items() if value is not None}
    start, forced = given.get("decoder_start_token_id", given.get("bos_token_id")), given.get("forced_bos_token_id")
    if not isinstance(start, int):
        raise InvalidRequest(
            "config.json names no decoder_start_token_id, with which the decoder begins: give it with --hf-overrides "
            "'{\"decoder_start_token_id\": ID}'"
        )
    return start, forced if isinstance(forced, int) else None


def both_sides(
    prompt: ParsedPrompt,
    start: tuple[int, int | None],
    most: int,
    keep: int | None,
    encode: Callable[[str, bool], list[int]],
    check: Callable[[np.ndarray], None],
) -> ParsedPrompt:
    """The prompt with the ids of both sides; one that names no sides is the encoder's.

    The encoder reads the last `keep` tokens of its part. `encode` makes ids of text, with or without special tokens,
    `check` refuses ids. Raises `InvalidRequest` for more than `most` tokens of the encoder, or none.
    """
    empty, named = type(prompt), prompt.encoder is not None
    decoder, encoder = (prompt, prompt.encoder) if prompt.encoder is not None else (empty(salt=prompt.salt), prompt)
    if prompt.embeds is not None:
        raise InvalidRequest(
            "prompt_embeds are not for a model with an encoder; give text or token ids", "prompt_embeds"
        )
    read = encoder.token_ids
    if read is None:
        read = np.array(encode(encoder.text or "", True), np.int64)
    read = read if keep is None else read[-keep:]
    if not 0 < len(read) <= most:
        raise InvalidRequest(
            f"the encoder prompt has {len(read)} tokens; the model's encoder reads 1 to {most}, all in one step",
            _ENCODER if named else "prompt",
        )
    _of_side(_ENCODER if named else "", check, read)
    encoder = msgspec.structs.replace(encoder, token_ids=read, listed=read.tolist())
    ids = decoder.ids if decoder.token_ids is not None else encode(decoder.text, False) if decoder.text else []
    if ids:
        _of_side(_DECODER, check, np.array(ids, np.int64))
    begun = ids if ids[:1] == [start[0]] else [start[0], *ids]
    if len(begun) == 1 and start[1] is not None:
        begun.append(start[1])
    return msgspec.structs.replace(decoder, token_ids=np.array(begun, np.int64), listed=begun, encoder=encoder)


def _of_side(name: str, work: Callable[[Any], T], value: Any) -> T:
    """What `work` makes of the part of a prompt that has that name; "": the prompt names no sides."""
    try:
        return work(value)
    except InvalidRequest as error:
        raise (InvalidRequest(f"{quoted(name)}: {error}", name) if name else error) from None
