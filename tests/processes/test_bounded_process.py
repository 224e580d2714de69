"""A child that answers questions: how its death is told."""

from __future__ import annotations

import sys

import pytest

from frame.core.processes import bounded_process
from frame.core.processes.bounded_process import BoundedProcess, Ready, Refused


def test_a_child_that_ends_before_it_reads_its_start_message_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_process, "python_command", lambda *_: [sys.executable, "-c", "pass"])
    process = BoundedProcess("template", {"text": "x" * 1_000_000}, Ready | Refused)
    with pytest.raises(RuntimeError, match="the process 'frame template' did not start"):
        process.ask(Ready(), 10)
    assert process._process is None
    assert process._channel is None
