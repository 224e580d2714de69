"""When workers may capture one more shape: at once while nothing else is to do, now and then while requests run.

The engine decides it and the plan says it, so that all workers of an engine do it together. Knows no shape.
"""

from __future__ import annotations

from ..interfaces.step import StepPlan, StepResult

#: Steps of requests from one capture to the next, which holds up tokens by up to 50 ms.
BUSY_STEPS = 16


class IdleCapture:
    """`wanted`: whether the newest answer of the workers asks for another CUDA graph."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._steps = 0
        self._asked: int | None = None  # the step after which one is made

    def allow(self, plan: StepPlan) -> None:
        """Called with each plan before its launch: may ask for a capture after that step."""
        self._steps += 1
        free = not len(plan.slots) or self._steps > BUSY_STEPS
        if self.wanted and free and self._asked is None:
            plan.capture = True
            self._asked = plan.step
            self._steps = 0

    def answer(self, plan: StepPlan, result: StepResult | None) -> None:
        """Called with each answered step; without a result when it failed."""
        if plan.step == self._asked:
            self._asked = None
        if result is not None and self._asked is None:
            self.wanted = result.wants_capture
