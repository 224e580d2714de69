"""Merges the answers of all workers to a step into one result. Knows no request and no executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from msgspec import structs

from frame.core.interfaces.step import StepResult, TransferReport

T = TypeVar("T", str, bytes)


class ResultMerge:
    """Merges the results of a step: tokens are the first worker's, a KV transfer is complete once all workers named it.

    `num_answers` is how many workers answer each step.
    """

    def __init__(self, num_answers: int) -> None:
        self._num_answers = num_answers
        self._sent: dict[str, int] = {}  # request id -> workers that have named it
        self._received: dict[str, int] = {}
        self._events: dict[bytes, int] = {}

    def merge(self, answers: Sequence[StepResult]) -> StepResult:
        """What the step did; a single answer passes untouched. Raises `RuntimeError` when workers left some out."""
        if len(answers) != self._num_answers:
            raise RuntimeError(f"{len(answers)} of {self._num_answers} workers answered a step")
        if len(answers) == 1:
            return answers[0]
        failed = {row: reason for answer in answers for row, reason in answer.failed.items()}
        reports = [answer.transfer for answer in answers if answer.transfer is not None]
        return structs.replace(
            answers[0],
            failed=failed,
            transfer=self._transfer(reports) if reports else None,
            wants_capture=any(answer.wants_capture for answer in answers),
        )

    def _transfer(self, reports: Sequence[TransferReport]) -> TransferReport:
        counters, gauges = Counter[str](), dict[str, float]()
        for report in reports:
            counters.update(report.counters)
            for name, value in report.gauges.items():
                gauges[name] = max(value, gauges.get(name, value))
        return TransferReport(
            sent=self._complete(self._sent, [name for report in reports for name in report.sent]),
            received=self._complete(self._received, [name for report in reports for name in report.received]),
            failed_blocks=sorted({block for report in reports for block in report.failed_blocks}),
            counters=dict(counters),
            gauges=gauges,
            events=self._complete(self._events, [event for report in reports for event in report.events]),
            notes=[note for report in reports for note in report.notes],
        )

    def _complete(self, seen: dict[T, int], names: Sequence[T]) -> list[T]:
        """The ids or events that all workers have named by now."""
        done = []
        for name in names:
            seen[name] = seen.get(name, 0) + 1
            if seen[name] == self._num_answers:
                del seen[name]
                done.append(name)
        return done
