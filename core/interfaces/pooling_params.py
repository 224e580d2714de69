"""Pooling as data: what a request may ask of a pooling engine, and what the engine says it can do.

A pooling request ends with its prefill. Its answer is one vector, or one for each token, instead of tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from frame.quoting import quoted

from .sampling import RequestOutputKind

#: "encode" is what the model does by default; "score" classifies two texts that are one prompt.
PoolingTask = Literal["encode", "embed", "classify", "score", "reward", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How one prompt is pooled; None means as the engine is configured. Raises `ValueError` for a value out of range.

    `dimensions` shortens an embedding before it is normalised (Matryoshka models only). `truncate_prompt_tokens` k
    keeps k tokens of a longer prompt, -1 as many as the model takes. The front sets the fields after `task` at
    admission: `reads_cache`: a cached prefix may be skipped; `second_segment`: the position where the second text of a
    pair begins, -1 without one; `per_token`: every token gets a row.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None
    skip_clone: bool = False
    reads_cache: bool = True
    second_segment: int = -1
    per_token: bool = False

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Checks every field against its own range; raises `ValueError` naming the first that is out of it."""
        for name, least in (("truncate_prompt_tokens", -1), ("dimensions", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least or value == 0):
                raise ValueError(f"{name} must be an integer of at least {max(least, 1)}, got {quoted(value)}")
        for name in ("normalize", "use_activation"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name} must be true, false or None, got {quoted(getattr(self, name))}")

    @property
    def output_kind(self) -> RequestOutputKind:
        """FINAL_ONLY: there is one output, at the end."""
        return RequestOutputKind.FINAL_ONLY

    def clone(self) -> PoolingParams:
        """A copy that the engine may keep."""
        return msgspec.structs.replace(self)


class PoolingFacts(msgspec.Struct, kw_only=True):
    """What a pooling engine can do. Requests may name any of `tasks`; the first is the default.

    `size` is the length of the rows that it returns: of an embedding, or the number of classes. With `matryoshka`,
    `dimensions` may be any of `embedding_sizes`, or anything up to `size` when that is []. `cached_sequence` and
    `cached_tokens` say whether cached prefixes may be skipped when the sequence, or each token, is pooled.
    """

    tasks: list[PoolingTask]
    size: int
    labels: list[str] = []
    normalize: bool = True
    use_activation: bool = True
    dimensions: int | None = None
    matryoshka: bool = False
    embedding_sizes: list[int] = []
    cached_sequence: bool = False
    cached_tokens: bool = False
    segments: bool = False
    pooler: str = ""
