"""The server of a soak: its processes, what they hold, and their deaths."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


class SoakServer:
    """`frame serve` with these arguments, from the start until `stop`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `stop`
        command = [sys.executable, "-m", "frame", "serve", *arguments, "--port", "0", "--disable-access-log"]
        self.process = subprocess.Popen(command, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.seen: set[int] = set()  # every process that ever belonged to it
        self.url = self._find_url()

    def text(self) -> str:
        """All that it printed."""
        self.log.flush()
        return Path(f"/proc/self/fd/{self.log.fileno()}").read_text(errors="replace")

    def _find_url(self) -> str:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            match = re.search(r"serving .* at (http://\S+)", self.text())
            if match:
                return match.group(1)
            time.sleep(0.1)
        self.process.kill()
        raise SystemExit(f"the server does not start:\n{self.text()}")

    def processes(self) -> list[tuple[str, int]]:
        """(name, pid) of the server and all below it: parent, api, engine, standby, worker, grammar."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _stat(int(entry.name))) and fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
        below, found = {self.process.pid}, [("parent", self.process.pid)]
        for _ in range(4):  # deeper than processes nest
            for pid, parent in sorted(parents.items()):
                if parent in below and pid not in below:
                    below.add(pid)
                    found.append((_name(pid), pid))
        self.seen.update(below)
        return found

    def pids(self, name: str) -> list[int]:
        """The processes of a name, the oldest first."""
        return [pid for found, pid in self.processes() if found == name]

    def kill(self, name: str) -> bool:
        """kill -9 to the oldest process of a name; whether there was one."""
        pids = self.pids(name)
        if pids:
            os.kill(pids[0], signal.SIGKILL)
        return bool(pids)

    def stop(self) -> tuple[int, list[int]]:
        """Ends it by SIGTERM; returns its exit status, and processes that it left behind."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(90)
        deadline = time.monotonic() + 10
        while (left := [pid for pid in self.seen if _is_ours(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return status, left

    def close(self) -> None:
        """Leaves nothing, whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process; raises `OSError` when it is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    """Open files of a process; raises `OSError` when it is gone."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _is_ours(pid: int) -> bool:
    """Whether it runs, and is not another process that has got the number meanwhile."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z" and "\0frame\0" in _command(pid)


def _name(pid: int) -> str:
    name = _command(pid).partition("\0frame\0")[2].partition("\0")[0] or "other"
    if name == "engine":
        try:
            standby = Path(f"/proc/{pid}/comm").read_text().strip() == "frame-standby"
        except OSError:
            return "other"
        return "standby" if standby else "engine"
    return name
