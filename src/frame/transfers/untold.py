"""Reports of a KV connector's worker side that the engine did not get, because their step failed on another worker.

They are told again with a later step. Knows no connector, and of reports only how two become one.
"""

from __future__ import annotations

from frame.core.interfaces.step import StepPlan, TransferReport
from frame.core.interfaces.wire import decode

#: The name, among the extras of a plan, of the numbers of steps whose reports are to be told again.
LOST = "connector_lost"
#: Steps that may be on their way when one fails, and more.
_KEPT_STEPS = 256


class UntoldReports:
    """A worker's reports of its last steps, until the engine has them."""

    def __init__(self) -> None:
        self._reports: dict[int, TransferReport] = {}  # by step, oldest first
        self._nothing = TransferReport()

    def told(self, plan: StepPlan, report: TransferReport) -> TransferReport:
        """What is to be told in the step of `plan`: `report`, and those of the lost steps that it names."""
        if lost := plan.extras.get(LOST):
            for step in reversed(decode(lost, list[int])):
                if (earlier := self._reports.pop(step, None)) is not None:
                    report = joined(earlier, report)
        if report != self._nothing:
            self._reports[plan.step] = report
        while self._reports and next(iter(self._reports)) <= plan.step - _KEPT_STEPS:
            del self._reports[next(iter(self._reports))]
        return report


def joined(earlier: TransferReport, later: TransferReport) -> TransferReport:
    """What a connector reported in two steps, as one report."""
    counters = dict(later.counters)
    for name, value in earlier.counters.items():
        counters[name] = counters.get(name, 0.0) + value
    return TransferReport(
        sent=earlier.sent + later.sent,
        received=earlier.received + later.received,
        failed_blocks=earlier.failed_blocks + later.failed_blocks,
        counters=counters,
        gauges=earlier.gauges | later.gauges,
        events=earlier.events + later.events,
        notes=earlier.notes + later.notes,
    )
