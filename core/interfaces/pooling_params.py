"""Pooling as data: what a request may ask, and what a pooling engine says of itself. Knows no tensor and no text.

A pooling request ends with its prefill: its answer is a vector, or one a token, instead of tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .sampling import RequestOutputKind

#: "encode" is whatever the model does by default; "score" of two texts is a pair of them as one prompt, classified.
PoolingTask = Literal["encode", "embed", "classify", "score", "reward", "token_embed", "token_classify"]


class PoolingParams(msgspec.Struct, omit_defaults=True):
    """How one prompt is pooled. None: as the model was configured.

    `dimensions` cuts an embedding before it is normalised (Matryoshka models only). `truncate_prompt_tokens` k keeps k
    tokens of a longer prompt, -1 as many as the model takes. The fields after `task` are filled in at admission:
    `reads_cache` says whether a cached prefix may be skipped, `second_segment` is where the second text of a pair
    begins (-1: nowhere), `per_token` whether every token gets a row.
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
                raise ValueError(f"{name} must be an integer of at least {max(least, 1)}, got {value!r}")
        for name in ("normalize", "use_activation"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name} must be true, false or None, got {getattr(self, name)!r}")

    @property
    def output_kind(self) -> RequestOutputKind:
        """There is one output, at the end."""
        return RequestOutputKind.FINAL_ONLY

    def clone(self) -> PoolingParams:
        """A copy that the engine may keep."""
        return msgspec.structs.replace(self)


class PoolingFacts(msgspec.Struct, kw_only=True):
    """What a pooling engine can do. `tasks` are those that requests may name, the first is the default.

    `size` is the length of a row that it gives: of an embedding, or the number of classes. `embedding_sizes` are those
    that `dimensions` may name, [] for any when `matryoshka`. `cached_sequence` and `cached_tokens` say whether cached
    prefixes may be skipped when the sequence, or each token, is pooled.
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
