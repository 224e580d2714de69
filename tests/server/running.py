"""Starts servers for tests and knows what they print, where they listen and which processes they have."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

#: without a second engine process, whose imports would slow other tests down
FAKE = [sys.executable, str(Path(__file__).with_name("fake_serve.py")), "--no-standby-engine"]
REAL = [sys.executable, "-m", "frame", "serve", "--no-standby-engine"]


def process_name(entry: Path) -> str:
    """What the process of a folder of /proc does for its server: api, engine or standby."""
    if "\0api\0" in (entry / "cmdline").read_bytes().decode():
        return "api"
    return "standby" if (entry / "comm").read_text().strip() == "frame-standby" else "engine"


class Running:
    """One server process."""

    def __init__(self, command: list[str], *arguments: str, cwd: Path | None = None) -> None:
        # plugins of these tests are found by their place in the repository, which processes of frame do not look into
        places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
        self.process = subprocess.Popen(
            [*command, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True, env=environment, cwd=cwd
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            self.lines.extend(self.process.stderr)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, seconds: float = 120) -> None:
        def ready() -> bool:
            match = re.search(r"serving (.*) at (https?://\S+)", self.text)
            self.url = match.group(2) if match else ""
            return match is not None or self.process.poll() is not None

        until(ready, seconds, lambda: self.text)
        assert self.url, self.text

    def until_said(self, pattern: str, count: int = 1, seconds: float = 60) -> None:
        """Waits until it has printed so often what matches: what it says before it answers may be read after that."""
        until(lambda: len(re.findall(pattern, self.text)) >= count, seconds, lambda: f"{pattern!r} in {self.text}")

    def wait(self, seconds: float = 60) -> int:
        status = self.process.wait(seconds)
        self._reader.join(60)
        return status

    def children(self) -> dict[str, int]:
        """Name -> pid of the processes below the server's."""
        return dict(self._children())

    def children_named(self, name: str) -> list[int]:
        return [pid for found, pid in self._children() if found == name]

    def _children(self) -> list[tuple[str, int]]:
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid and fields[0] != "Z":
                    found.append((process_name(entry), int(entry.name)))
        return found

    def below(self, name: str) -> list[int]:
        """The processes that the first child of this name has started."""
        parent = str(self.children()[name])
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[1] == parent:
                    found.append(int(entry.name))
        return found

    def engine(self, path: str = "/health") -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=60).text
        match = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert match is not None, text
        return float(match.group(1))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(60)


def until(condition: Callable[[], Any], seconds: float = 60, explain: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {explain()}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextlib.contextmanager
def server(command: list[str], *arguments: str) -> Iterator[Running]:
    running = Running(command, *arguments)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()
