"""Answers of the pooling routes: structs that encode to the bytes on the wire."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from frame.interfaces import Serving

from .merging import together


class PoolingUsage(Struct):
    """Tokens of a whole request; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class PooledItem(Struct):
    """One input's row: `embedding` or `data`, as numbers or base64 of little-endian float32."""

    index: int
    object: str
    embedding: Any = UNSET
    data: Any = UNSET


class ClassItem(Struct):
    """One input's classes; `label` is that of the most probable."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ScoreItem(Struct):
    """One pair's score."""

    index: int
    object: str
    score: float


class Pooled(Struct):
    """A whole response of `/v1/embeddings`, `/pooling`, `/classify` or `/score`."""

    id: str
    object: str
    created: int
    model: str
    data: Sequence[PooledItem | ClassItem | ScoreItem]
    usage: PoolingUsage


class RerankItem(Struct):
    """One document's place in the ranking."""

    index: int
    relevance_score: float
    document: dict[str, str] | UnsetType = UNSET


class Reranked(Struct):
    """A whole response of the rerank routes, best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankItem]
    meta: Any = UNSET


def to_base64(values: np.ndarray, dtype: str, *, big: bool = False) -> str:
    """The bytes of a row or rows in float32, float16 or bfloat16, rounded to the nearest; `big`: big-endian."""
    kind = {"float32": "f4", "float16": "f2", "bfloat16": "u2"}[dtype]
    if dtype == "bfloat16":  # bfloat16 is the upper half of a float32
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    with np.errstate(over="ignore"):  # values beyond float16's range become infinite
        return base64.b64encode(np.ascontiguousarray(values, (">" if big else "<") + kind).tobytes()).decode()


def usage_of(counts: Sequence[int]) -> PoolingUsage:
    """The sum of prompts' tokens."""
    return PoolingUsage(sum(counts), sum(counts))


async def pool_all(serving: Serving, body: Any, params: Any, name: str) -> list[Any]:
    """The outputs of all inputs of a body, in order; the first failure ends the rest."""
    unique = uuid.uuid4().hex[:8]  # clients choose request ids, and may use one twice at the same time
    pool = serving.generation.pool
    return await together(
        pool(prompt, params, f"{name}-{unique}-{number}", priority=body.priority)
        for number, prompt in enumerate(body.prompts())
    )
