"""Which sizes a step runs at: those of a CUDA graph that serves it, else its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from frame.interfaces import AnyShape, StepPlan, StepShape

#: Larger batches run eagerly: their launches take less time than their work.
MAX_ROWS = 512
#: Rows of a graph → the most tokens of each for which there is another graph: attention of few and short rows takes
#: launches that would be slower for long ones (`frame.kernels.decode_few`), and a graph's launches serve any length.
SHORT_LENGTHS = {1: 8192, 2: 4096, 4: 1024, 8: 1024}
_MOST_SHORT_ROWS = max(SHORT_LENGTHS)


class CapturedSizes(Protocol):
    """The graphs that `CudaShapes` chooses among: `CudaGraphs`."""

    sizes: list[int]
    deterministic: bool

    @property
    def short(self) -> list[StepShape]:
        """The shapes of graphs for short rows alone."""

    def decode(
        self, rows: int, deterministic: bool, shared: bool, adapted: bool = False, longest: int = 0
    ) -> StepShape | None:
        """The shape of the graph that serves a decode step of `rows` rows, None if there is none.

        No row has more than `longest` tokens; 0: as many as there may be.
        """

    def padded(self, tokens: int) -> int:
        """The number of tokens that a step with prompts is padded to, 0 where it is not captured."""


class CudaShapes(AnyShape):
    """Pads decode steps to the next larger graph, and ordinary steps with prompts to the next size in pieces."""

    def __init__(self, graphs: CapturedSizes) -> None:
        self._graphs = graphs

    def choose(self, plan: StepPlan) -> StepShape:
        rows, tokens, shared = len(plan.slots), plan.num_tokens, bool(plan.prefixes)
        deterministic = plan.deterministic or self._graphs.deterministic
        if tokens == rows:
            longest = int((plan.num_computed + plan.num_scheduled).max()) if rows <= _MOST_SHORT_ROWS else 0
            captured = self._graphs.decode(rows, deterministic, shared, plan.adapted, longest)
            return captured or replace(super().choose(plan), deterministic=deterministic)
        padded = 0 if deterministic or shared or plan.adapted else self._graphs.padded(tokens)
        return replace(super().choose(plan), padded_tokens=padded or tokens, deterministic=deterministic)

    def join(self, shapes: Sequence[StepShape]) -> StepShape | None:
        first = shapes[0]
        if any(one.padded_tokens != one.padded_rows or one.shared != first.shared for one in shapes):
            return None
        rows, adapted = max(one.padded_rows for one in shapes), any(one.adapted for one in shapes)
        longest = max(one.max_seq_len for one in shapes) if all(one.max_seq_len for one in shapes) else 0
        return self._graphs.decode(rows, first.deterministic, first.shared, adapted, longest)

    def every(self) -> list[StepShape]:
        # sizes between two of these launch the kernels of one of them: powers of two, and from 32 on quarters between
        given = self._graphs
        sizes = [size for size in reversed(given.sizes) if is_met(size) or size == given.sizes[-1]]
        numerics = (True,) if given.deterministic else (False, True)
        return [decode_shape(size, deterministic) for deterministic in numerics for size in sizes] + given.short


def is_met(size: int) -> bool:
    """Whether launch code may choose other kernels for so many rows than for fewer, down to the next such number."""
    lowest = size & -size
    return size == lowest or (size >= 32 and size // lowest in (3, 5))


@lru_cache(maxsize=8 * MAX_ROWS)
def decode_shape(
    rows: int, deterministic: bool = False, shared: bool = False, adapted: bool = False, longest: int = 0
) -> StepShape:
    """The shape of a captured decode step of `rows` rows of up to `longest` tokens; 0: of any length."""
    return StepShape(rows, rows, max_seq_len=longest, deterministic=deterministic, shared=shared, adapted=adapted)


def prompt_shape(tokens: int) -> StepShape:
    """The shape of a captured step of a prompt of `tokens` tokens."""
    return StepShape(tokens, 1, max_query_len=tokens)


def kind_of(deterministic: bool, shared: bool, adapted: bool = False) -> str:
    """The kind of a decode step; each kind has graphs of its own."""
    kind = "deterministic" if deterministic else "shared" if shared else "decode"
    return f"adapted-{kind}" if adapted else kind


def name_of(shape: StepShape) -> str:
    """The name of a shape's graph in logs."""
    if shape.padded_tokens != shape.padded_rows:
        return f"pieces-{shape.padded_tokens}"
    kind = kind_of(shape.deterministic, shape.shared, shape.adapted)
    return f"{'short-' if shape.max_seq_len else ''}{kind}-{shape.padded_rows}"
