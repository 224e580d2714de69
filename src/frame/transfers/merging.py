"""Merges the answers of all workers to a step into one result. Knows no executor, and of requests the ids alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import structs

from frame.core.interfaces.step import StepResult, TransferReport

T = TypeVar("T", str, bytes)


class ReportMerge:
    """Merges what several workers report of a connector: a transfer is complete once all of them named it.

    `num_workers` is how many report. `awaits` says whether the blocks of the request of an id wait for that: a worker
    that names another id, because it comes late or names one twice, changes nothing.
    """

    def __init__(self, num_workers: int, awaits: Callable[[str], bool] = lambda request_id: True) -> None:
        self._num_workers = num_workers
        self._awaits = awaits
        self._sent: dict[str, set[int]] = {}  # request id -> the workers that have named it, by place
        self._received: dict[str, set[int]] = {}
        self._events: dict[bytes, set[int]] = {}

    def merge(self, reports: Mapping[int, TransferReport]) -> TransferReport:
        """What workers, by place, reported in a step; some may have reported nothing."""
        counters, gauges = Counter[str](), dict[str, float]()
        for report in reports.values():
            counters.update(report.counters)
            for name, value in report.gauges.items():
                gauges[name] = max(value, gauges.get(name, value))
        for named in (self._sent, self._received):
            for request_id in [one for one in named if not self._awaits(one)]:
                del named[request_id]  # its blocks were given back without the word of the others
        return TransferReport(
            sent=self._complete(self._sent, {place: one.sent for place, one in reports.items()}, self._awaits),
            received=self._complete(
                self._received, {place: one.received for place, one in reports.items()}, self._awaits
            ),
            given_up=sorted({one for report in reports.values() for one in report.given_up}),
            failed_blocks=sorted({block for report in reports.values() for block in report.failed_blocks}),
            counters=dict(counters),
            gauges=gauges,
            events=self._complete(self._events, {place: one.events for place, one in reports.items()}),
            notes=[note for report in reports.values() for note in report.notes],
        )

    def _complete(
        self, seen: dict[T, set[int]], named: Mapping[int, Sequence[T]], counts: Callable[[T], bool] = lambda name: True
    ) -> list[T]:
        """The ids or events, of those that count, which all workers have named by now."""
        done = []
        for place, names in named.items():
            for name in filter(counts, dict.fromkeys(names)):
                workers = seen.setdefault(name, set())
                workers.add(place)
                if len(workers) == self._num_workers:
                    del seen[name]
                    done.append(name)
        return done


class ResultMerge:
    """Merges the results of a step: tokens are the first worker's, transfers are merged as `ReportMerge` does.

    `num_answers` is how many workers answer each step.
    """

    def __init__(self, num_answers: int, awaits: Callable[[str], bool] = lambda request_id: True) -> None:
        self._num_answers = num_answers
        self._reports = ReportMerge(num_answers, awaits)

    def merge(self, answers: Sequence[StepResult]) -> StepResult:
        """What the step did; a single answer passes untouched. Raises `RuntimeError` when workers left some out."""
        if len(answers) != self._num_answers:
            raise RuntimeError(f"{len(answers)} of {self._num_answers} workers answered a step")
        if len(answers) == 1:
            return answers[0]
        failed = {row: reason for answer in answers for row, reason in answer.failed.items()}
        reports = {place: answer.transfer for place, answer in enumerate(answers) if answer.transfer is not None}
        return structs.replace(
            answers[0],
            failed=failed,
            transfer=self._reports.merge(reports) if reports else None,
            wants_capture=any(answer.wants_capture for answer in answers),
        )
