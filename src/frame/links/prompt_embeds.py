"""Reads the embeddings that prompts bring in the place of tokens: tensors, arrays, or safetensors bytes in base64.

They become float32, which holds every number of the types that are taken. Knows no model but the size of its
embeddings.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from frame.core.interfaces.engine import MAX_EMBEDS_BYTES, NO_TOKEN, PromptEmbeds
from frame.core.interfaces.errors import InvalidRequest

_FIELD = "prompt_embeds"
#: The types that are taken, as safetensors, torch and numpy name them; bfloat16 as the bits that it is.
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAMES = ("float32", "float16", "bfloat16")
#: How files of torch.save begin: as archives, or as bare pickles.
_PICKLES = (b"PK\x03\x04", b"\x80")
_MAX_AXES = 8
_MAX_HEADER_BYTES = 1 << 16


def placed(value: Any, ids: np.ndarray | None) -> tuple[np.ndarray, PromptEmbeds]:
    """A prompt's ids, int32 [n], and the embeddings in it, from one or several of any form.

    Each NO_TOKEN of `ids` stands for all rows of the next one; without `ids` the prompt is nothing but these rows.
    Raises `InvalidRequest`.
    """
    parts = [_rows(one) for one in (value if isinstance(value, list | tuple) else [value])]
    ids = np.full(len(parts), NO_TOKEN) if ids is None else ids
    marks = np.flatnonzero(ids == NO_TOKEN)
    if not parts or len(marks) != len(parts):
        raise InvalidRequest(
            f"the prompt has {len(marks)} places for embeddings (token id {NO_TOKEN}) and {len(parts)} prompt_embeds; "
            "give one for each",
            _FIELD,
        )
    if len(sizes := sorted({part.shape[1] for part in parts})) > 1:
        raise InvalidRequest(f"prompt_embeds of one prompt must have rows of one size, got {sizes}", _FIELD)
    counts = np.ones(len(ids), np.int64)
    counts[marks] = [len(part) for part in parts]
    ids = np.repeat(ids, counts)
    places = np.flatnonzero(ids == NO_TOKEN).astype(np.int32)
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return ids, PromptEmbeds(rows=rows, places=places)


def check_accepted(prompt: Any, size: int) -> None:
    """Raises `InvalidRequest` for a prompt with embeddings that no engine takes (`size` 0), before these are read."""
    if not size and isinstance(prompt, Mapping) and prompt.get(_FIELD) is not None:
        raise InvalidRequest("prompt_embeds are not accepted; start the engine with --enable-prompt-embeds", _FIELD)


def check_embeds(embeds: PromptEmbeds, size: int) -> None:
    """Raises `InvalidRequest` unless the engine, whose embeddings have `size` numbers, takes them; 0: it takes none."""
    if not size:
        raise InvalidRequest("prompt_embeds are not accepted; start the engine with --enable-prompt-embeds", _FIELD)
    if embeds.rows.shape[1] != size:
        raise InvalidRequest(
            f"prompt_embeds must have the shape [n, {size}], got {list(embeds.rows.shape)}",
            _FIELD,
        )
    if embeds.rows.nbytes > MAX_EMBEDS_BYTES:
        most = MAX_EMBEDS_BYTES // 4 // size
        raise InvalidRequest(f"prompt_embeds have {len(embeds.rows)} rows, at most {most} are taken", _FIELD)
    wrong = np.flatnonzero(~np.isfinite(embeds.rows).all(1))
    if len(wrong):
        raise InvalidRequest(f"prompt_embeds must be finite; row {int(wrong[0])} holds NaN or infinity", _FIELD)


def _rows(value: Any) -> np.ndarray:
    """float32 [n, size] of a prompt's embeddings; a copy of the caller's, which may change later."""
    if isinstance(value, str):
        array = _read_safetensors(value)
    elif isinstance(value, np.ndarray):
        array = np.array(_of_type(value, str(value.dtype)), np.float32)
    elif hasattr(value, "detach") and hasattr(value, "dtype"):  # torch need not be there
        tensor = _of_type(value, str(value.dtype).removeprefix("torch.")).detach().cpu()
        array = np.array(tensor.float().numpy())
    else:
        raise InvalidRequest(
            f"prompt_embeds must be a tensor, or safetensors bytes as base64 text, got {type(value).__name__}", _FIELD
        )
    if array.ndim != 2 or not array.size:
        raise InvalidRequest(f"prompt_embeds must have the shape [n, hidden size], got {list(array.shape)}", _FIELD)
    return array


def _of_type(value: Any, name: str) -> Any:
    if name not in _NAMES:
        raise InvalidRequest(f"prompt_embeds must be of type {', '.join(_NAMES)}, got {name}", _FIELD)
    return value


def _read_safetensors(text: str) -> np.ndarray:
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(f"prompt_embeds must be base64: {str(error)[:80]}", _FIELD) from None
    length = int.from_bytes(data[:8], "little")
    try:
        if len(data) < 8 or not 2 <= length <= min(len(data) - 8, _MAX_HEADER_BYTES):
            raise ValueError
        header = json.loads(data[8 : 8 + length])
        tensors = [value for name, value in header.items() if name != "__metadata__"]
        kinds = [str(tensor["dtype"]) for tensor in tensors]
        shapes = [[int(count) for count in tensor["shape"]] for tensor in tensors]
        if any(len(shape) > _MAX_AXES for shape in shapes):
            raise ValueError
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError):
        what = "what torch.save writes, which is not read" if data.startswith(_PICKLES) else "no safetensors file"
        raise InvalidRequest(f"prompt_embeds are {what}; send the bytes of safetensors.torch.save", _FIELD) from None
    if len(tensors) != 1:
        raise InvalidRequest(f"prompt_embeds must hold one tensor, got {len(tensors)}", _FIELD)
    if (kind := kinds[0]) not in _TYPES:
        raise InvalidRequest(f"prompt_embeds must be of type {', '.join(_TYPES)}, got {kind:.20}", _FIELD)
    if len(shapes[0]) != 2 or 0 in shapes[0]:
        raise InvalidRequest(f"prompt_embeds must have the shape [n, hidden size], got {shapes[0]}"[:200], _FIELD)
    (shape,), wanted = shapes, np.dtype(_TYPES[kind])
    count, held = math.prod(shape), len(data) - 8 - length
    if min(shape, default=0) < 0 or count * wanted.itemsize != held:
        raise InvalidRequest(f"prompt_embeds hold {held} bytes, which are no {kind} of shape {shape}"[:200], _FIELD)
    found = np.frombuffer(data, wanted, count, 8 + length).reshape(shape)
    return (found.astype("<u4") << 16).view("<f4") if kind == "BF16" else found.astype(np.float32)
