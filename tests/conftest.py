"""What all tests share: nothing outlives its package, long files come first, and clients are cheap and patient."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.family_cases import mark_families
from tests.product_cases import mark_others, mark_products

#: Begun first, so that no worker is left alone with one of them at the end (`--no-loadscope-reorder` keeps the order).
_LONG_FILES = (
    "tests/kernels/test_interpreted.py",
    "tests/processes/test_lifecycle.py",
    "tests/models/test_greedy.py",
    "tests/grammars/test_server.py",
    "tests/test_example_plugin.py",
    "tests/docs/test_examples.py",
    "tests/scenarios/test_offline.py",
    "tests/server/test_replay.py",
    "tests/kernels/test_compiles.py",
    "tests/worker/test_warm_up.py",
)
#: For answers of servers on a busy machine.
_PATIENT_SECONDS = 60.0
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


# examples have no time of their own: a busy machine would break it
settings.register_profile("frame", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("frame")


def pytest_configure(config: pytest.Config) -> None:
    """Clients of tests talk to this machine in the clear: with one root certificate they are made 40 times as fast."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG  # the object that is the default of every call
    default.connect = default.read = default.write = default.pool = _PATIENT_SECONDS
    end = "-----END CERTIFICATE-----\n"
    roots = Path(certifi.where()).read_text(encoding="ascii", errors="ignore")
    first = roots[roots.index("-----BEGIN") : roots.index(end)] + end
    folder = tempfile.TemporaryDirectory(prefix="frame-tests-")
    config.add_cleanup(folder.cleanup)
    Path(folder.name, "root.pem").write_text(first, encoding="ascii")
    os.environ["SSL_CERT_FILE"] = str(Path(folder.name, "root.pem"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives on: nothing of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_products(items)  # before cases are chosen by their markers
    mark_others(items)
    mark_families(items)
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    if os.path.isdir("/proc/self/task"):
        session.config.pluginmanager.register(Leftovers())
