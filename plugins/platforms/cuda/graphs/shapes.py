"""Which sizes a step runs at: those of a recording where there is one, its own otherwise. Knows no device."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from frame.interfaces import AnyShape, StepPlan, StepShape

#: Larger batches run eagerly: their launches take less time than their work.
MAX_ROWS = 512


class Recordings(Protocol):
    """What chooses sizes among recordings asks: `CudaGraphs`."""

    sizes: list[int]
    deterministic: bool

    def decode(self, rows: int, deterministic: bool, shared: bool) -> StepShape | None:
        """The recording that serves a decode step of so many rows, None if there is none."""

    def padded(self, tokens: int) -> int:
        """The number of tokens that a step with prompts is padded to, 0 where it is not recorded."""


class CudaShapes(AnyShape):
    """Pads decode steps to the next larger recording, and ordinary steps with prompts to the next size in pieces."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings

    def choose(self, plan: StepPlan) -> StepShape:
        rows, tokens, shared = len(plan.slots), plan.num_tokens, bool(plan.prefixes)
        deterministic = plan.deterministic or self._recordings.deterministic
        if tokens == rows:
            recorded = self._recordings.decode(rows, deterministic, shared)
            return recorded or replace(super().choose(plan), deterministic=deterministic)
        padded = 0 if deterministic or shared else self._recordings.padded(tokens)
        return replace(super().choose(plan), padded_tokens=padded or tokens, deterministic=deterministic)

    def every(self) -> list[StepShape]:
        # sizes between two of these launch the kernels of one of them
        given = self._recordings
        sizes = [size for size in reversed(given.sizes) if size & (size - 1) == 0 or size == given.sizes[-1]]
        numerics = (True,) if given.deterministic else (False, True)
        return [decode_shape(size, deterministic) for deterministic in numerics for size in sizes]


@lru_cache(maxsize=4 * MAX_ROWS)
def decode_shape(rows: int, deterministic: bool = False, shared: bool = False) -> StepShape:
    """A recorded decode step of so many rows, as long as any may be."""
    return StepShape(rows, rows, deterministic=deterministic, shared=shared)


def prompt_shape(tokens: int) -> StepShape:
    """A recorded step of a prompt of so many tokens."""
    return StepShape(tokens, 1, max_query_len=tokens)


def kind_of(deterministic: bool, shared: bool) -> str:
    """Of decode steps, which are recorded apart."""
    return "deterministic" if deterministic else "shared" if shared else "decode"


def name_of(shape: StepShape) -> str:
    """What a log calls the recording of that shape."""
    if shape.padded_tokens != shape.padded_rows:
        return f"pieces-{shape.padded_tokens}"
    return f"{kind_of(shape.deterministic, shape.shared)}-{shape.padded_rows}"
