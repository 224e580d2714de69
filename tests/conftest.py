"""Keeps test modules apart: what a package of tests started must have ended with it. Also keeps collections cheap."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

#: Long enough for what is ending on a busy machine.
_ENDING_SECONDS = 20.0
#: Of libraries, kept for the life of a process; by how their names or commands begin.
_KEPT = ("ThreadPoolExecutor", "asyncio_", "AnyIO worker", "tqdm", "execnet", "multiprocessing.resource_tracker")


def _children() -> dict[str, str]:
    """pid → command of the processes below this one, but for those that are being reaped."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command:
                    found[pid] = command
    return found


class Leftovers:
    """Threads and processes that a package of tests leaves behind fail its last test; later tests would meet them."""

    def __init__(self) -> None:
        self._known = set(self._running())

    def _running(self) -> dict[object, str]:
        threads: dict[object, str] = {
            thread: f"thread {thread.name!r}" for thread in threading.enumerate() if not thread.name.startswith(_KEPT)
        }
        return threads | {
            pid: f"process {pid}: {command[:200]}"
            for pid, command in _children().items()
            if not any(word in command for word in _KEPT)
        }

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """After the fixtures of a module, and at the border of a package also those that its modules share."""
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path != item.path:
                # what lives now is kept out of later collections, of which every engine makes one when it closes
                gc.collect()
                gc.freeze()
            if nextitem is None or nextitem.path.parent != item.path.parent:
                self._check(item.path.parent)

    def _check(self, folder: Path) -> None:
        deadline = time.monotonic() + _ENDING_SECONDS
        while left := {key: name for key, name in self._running().items() if key not in self._known}:
            if time.monotonic() > deadline:
                self._known |= set(left)
                pytest.fail(f"{folder.name} left behind {'; '.join(left.values())}", pytrace=False)
            time.sleep(0.02)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    if os.path.isdir("/proc/self/task"):
        session.config.pluginmanager.register(Leftovers())
