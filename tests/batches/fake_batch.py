"""`frame run-batch` over the fake engine, whose settings belong to no plugin."""

from __future__ import annotations

import sys
from pathlib import Path

from frame.core.cli import main
from frame.core.plugin_host.registry import Registry
from frame.plugins.batches.command import RunBatchCommand

if __name__ == "__main__":
    Registry.check = lambda *_: None  # type: ignore[method-assign, assignment]
    RunBatchCommand.engine_command = [sys.executable, str(Path(__file__).parents[1] / "server" / "fake_engine.py")]
    raise SystemExit(main.main(["run-batch", *sys.argv[1:]]))
