"""What a worker tells later of steps that failed: on another worker, behind the connector, or before it.

Knows of a connector only which loads it says go on, and of reports only how two become one.
"""

from __future__ import annotations

import logging

from frame.core.interfaces.connector import ConnectorWorker
from frame.core.interfaces.step import StepPlan, TransferReport
from frame.core.interfaces.wire import decode

logger = logging.getLogger("frame.transfers")

#: The name, among the extras of a plan, of the numbers of steps that failed, each with the requests whose loads it was
#: to begin.
LOST = "connector_lost"
#: Steps that may be on their way when one fails, and more.
_KEPT_STEPS = 256


class UntoldReports:
    """A worker's reports of its last steps, until the engine has them, and which steps its connector heard of."""

    def __init__(self) -> None:
        self._reports: dict[int, TransferReport] = {}  # by step, oldest first
        # steps that the connector began, or may have begun, and whether it was told which of their loads ended
        self._heard: dict[int, bool] = {}
        self._nothing = TransferReport()
        self._complained = False

    def begin(self, plan: StepPlan) -> None:
        """Called before the connector begins the step."""
        self._heard[plan.step] = False
        for known in (self._heard, self._reports):
            while known and next(iter(known)) <= plan.step - _KEPT_STEPS:
                del known[next(iter(known))]

    def told(self, plan: StepPlan, report: TransferReport, connector: ConnectorWorker) -> TransferReport:
        """What is to be told in the step of `plan`: `report`, and what the engine does not know of the lost steps.

        That is their reports, and that loads have ended of which the connector never heard, or which it never began.
        """
        if lost := plan.extras.get(LOST):
            for step, owners in reversed(decode(lost, list[tuple[int, list[str]]])):
                if (earlier := self._reports.pop(step, None)) is not None:
                    report = joined(earlier, report)
                if not self._heard.get(step, False):
                    ended = self._ended(step, owners, report, connector) if step in self._heard else owners
                    self._heard[step] = True  # told once
                    report = joined(TransferReport(received=ended), report)
        if report != self._nothing:
            self._reports[plan.step] = report
        return report

    def _ended(self, step: int, owners: list[str], report: TransferReport, connector: ConnectorWorker) -> list[str]:
        """Those of the requests whose loads do not go on though the connector heard of the step, and nobody told."""
        pending = self._pending(connector)
        if pending is None:
            return []
        told = {name for number, one in self._reports.items() if number >= step for name in one.received}
        return [name for name in owners if name not in {*pending, *report.received, *told}]

    def _pending(self, connector: ConnectorWorker) -> set[str] | None:
        """What the connector says; None where it cannot tell, or answers with what are no names."""
        try:
            names = connector.pending_loads()
            if isinstance(names, str):
                raise TypeError(f"{names!r} are no names of requests")
            return None if names is None else set(names)
        except Exception:
            if not self._complained:
                logger.exception("the KV connector failed in pending_loads: blocks of failed steps stay out of use")
            self._complained = True
            return None


def joined(earlier: TransferReport, later: TransferReport) -> TransferReport:
    """What a connector reported in two steps, as one report."""
    counters = dict(later.counters)
    for name, value in earlier.counters.items():
        counters[name] = counters.get(name, 0.0) + value
    return TransferReport(
        sent=earlier.sent + later.sent,
        received=earlier.received + later.received,
        given_up=earlier.given_up + later.given_up,
        failed_blocks=earlier.failed_blocks + later.failed_blocks,
        counters=counters,
        gauges=earlier.gauges | later.gauges,
        events=earlier.events + later.events,
        notes=earlier.notes + later.notes,
    )
