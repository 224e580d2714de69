"""Scores of pairs of texts, by a cross-encoder or by two embeddings. Knows no route."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from frame import PoolingParams
from frame.interfaces import Serving

from .merging import together


@dataclass(frozen=True)
class Score:
    """How well two texts match, and how many tokens were computed for it."""

    value: float
    num_tokens: int


async def score_texts(
    serving: Serving,
    first: Sequence[str],
    second: Sequence[str],
    params: PoolingParams,
    name: str,
    options: Mapping[str, Any],
) -> list[Score]:
    """One score for each pair (first[i], second[i]); an embedding is computed once for equal texts.

    `options` are those of `Serving.generation.pool`, and `cache_salt`.
    """
    options = dict(options)
    salt = options.pop("cache_salt", None)
    name = f"{name}-{uuid.uuid4().hex[:8]}"  # clients choose request ids, and may use one twice at the same time
    if serving.models.pooling is not None and "embed" in serving.models.pooling.tasks:
        return await _by_embeddings(
            serving, first, second, msgspec.structs.replace(params, task="embed"), name, salt, options
        )
    serving.models.require("score")
    asked = msgspec.structs.replace(params, task="score")

    async def one(number: int) -> Score:
        prompt = await serving.text.pair(first[number], second[number], asked, salt)
        output = await serving.generation.pool(prompt, asked, f"{name}-{number}", **options)
        return Score(float(output.outputs.data[0]), len(output.prompt_token_ids))

    return await together(one(number) for number in range(len(first)))


async def _by_embeddings(
    serving: Serving,
    first: Sequence[str],
    second: Sequence[str],
    params: PoolingParams,
    name: str,
    salt: str | None,
    options: Mapping[str, Any],
) -> list[Score]:
    salted = {} if salt is None else {"cache_salt": salt}
    texts = list(dict.fromkeys((*first, *second)))
    found = await together(
        serving.generation.pool({"prompt": text, **salted}, params, f"{name}-{number}", **options)
        for number, text in enumerate(texts)
    )
    outputs = dict(zip(texts, found, strict=True))
    return [
        Score(
            _cosine(outputs[one].outputs.data, outputs[other].outputs.data),
            len(outputs[one].prompt_token_ids) + len(outputs[other].prompt_token_ids),
        )
        for one, other in zip(first, second, strict=True)
    ]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two embeddings; 0 where one of them is zero."""
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0
