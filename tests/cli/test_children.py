"""The processes that frame starts itself."""

from __future__ import annotations

import sys

from frame.core.cli.children import run_child
from frame.core.worker import worker_process


def test_threads_of_a_worker_process_wait_no_five_milliseconds_for_each_other(monkeypatch):
    """Else a connector's thread would, behind each piece that it receives, while a step is launched."""
    before, found = sys.getswitchinterval(), []

    def serve(descriptor, heartbeat):
        found.append((descriptor, heartbeat, sys.getswitchinterval()))
        return 0

    monkeypatch.setattr(worker_process, "serve_worker", serve)
    try:
        assert run_child("worker", ["3", "--heartbeat", "4"]) == 0
    finally:
        sys.setswitchinterval(before)
    assert found == [(3, 4, 0.0005)]
