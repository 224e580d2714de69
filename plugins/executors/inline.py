"""The inline executor: one worker in the engine's own process."""

from __future__ import annotations

from frame.interfaces import Placement, TeamExecutor, WorkerProtocol


class InlineExecutor(TeamExecutor):
    """Calls the worker directly; steps still overlap, because the device works while the host plans the next step."""

    is_local = True

    def make(self, placement: Placement) -> WorkerProtocol:
        return self.workers.local(placement)
