"""A platform that takes a few sizes only, as a compiler for static shapes does: the CPU, and every step padded."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from frame.interfaces import AnyShape, Length, StepPlan, Steps, StepShape
from frame.plugins.platforms.cpu import CpuPlatform

ROWS = (2, 8)
TOKENS = (2, 8, 32, 128, 512)
LENGTHS = (32, 128)


def next_of(sizes: tuple[int, ...], count: int) -> int:
    """The smallest size that holds `count`; beyond the last one, a multiple of it."""
    return next((size for size in sizes if size >= count), -(-count // sizes[-1]) * sizes[-1])


class FewShapes(AnyShape):
    """Steps of two numbers of rows, and of a few of tokens and of lengths."""

    def choose(self, plan: StepPlan) -> StepShape:
        exact = super().choose(plan)
        rows = next_of(ROWS, exact.padded_rows)
        return replace(
            exact,
            padded_tokens=next_of(TOKENS, max(exact.padded_tokens, rows)),
            padded_rows=rows,
            padded_samples=rows,
            max_query_len=next_of((1, 128), exact.max_query_len),
            max_seq_len=next_of(LENGTHS, exact.max_seq_len),
        )

    def pad(self, what: Length, count: int) -> int:
        return next_of((8, 64) if what != "values" else (8, 64, 1024), count)


class FewSizes(CpuPlatform):
    """The CPU at few sizes."""

    def steps(self) -> Steps:
        return Steps(shapes=FewShapes())


class _AllThatSample(FewShapes):
    def choose(self, plan: StepPlan) -> StepShape:
        return replace(super().choose(plan), padded_samples=0)


class _Unpadded(FewShapes):
    forgotten: ClassVar[Length]

    def pad(self, what: Length, count: int) -> int:
        return count if what == self.forgotten else super().pad(what, count)


class Unpadded(FewSizes):
    """Forgets one of the things that vary in length."""

    def steps(self) -> Steps:
        return Steps(shapes=_Unpadded())

    @staticmethod
    def forget(what: Length) -> None:
        """What it forgets from now on."""
        _Unpadded.forgotten = what


class UnpaddedSamples(FewSizes):
    """Forgets that not every row samples."""

    def steps(self) -> Steps:
        return Steps(shapes=_AllThatSample())
