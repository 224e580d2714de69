"""`frame route` as a process."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.server.running import Running, until

ROUTE = [sys.executable, "-m", "frame", "route"]


class RunningFront(Running):
    """One front."""

    def wait_ready(self, seconds: float = 60) -> None:
        def ready() -> bool:
            match = re.search(r"routing to .* at (https?://\S+)", self.text)
            self.url = match.group(1) if match else ""
            return match is not None or self.process.poll() is not None

        until(ready, seconds, lambda: self.text)
        assert self.url, self.text


@contextlib.contextmanager
def route(*arguments: str, cwd: Path | None = None) -> Iterator[RunningFront]:
    running = RunningFront(ROUTE, *arguments, cwd=cwd)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()
