"""How long no engine serves after a kill -9 of it, with another process standing by and without.

    python -m benchmarks.restart
    python -m benchmarks.restart --kills 5 -- /models/qwen3

Prints a JSON report: seconds from the kill until `/ready` answers 200 again, and the load of the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soak_server import SoakServer

_TICKS = os.sysconf("SC_CLK_TCK")


def measure(arguments: Sequence[str], kills: int) -> dict[str, Any]:
    """Kills the engine of one server so many times."""
    server = SoakServer(arguments)
    try:
        seconds = [_restart(server, standby="--no-standby-engine" not in arguments) for _ in range(kills)]
        server.stop()
    finally:
        server.close()
    return {"median": sorted(seconds)[kills // 2], "all": seconds, "load": round(os.getloadavg()[0], 1)}


def _restart(server: SoakServer, standby: bool) -> float:
    if standby:
        _until_loaded(server)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        start = time.perf_counter()
        server.kill("engine")
        for status in (503, 200):
            while client.get("/ready").status_code != status:
                time.sleep(0.005)
        seconds = time.perf_counter() - start
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 8}).raise_for_status()
    return round(seconds, 2)


def _until_loaded(server: SoakServer) -> None:
    """Waits until the process that stands by has nothing to do any more."""
    used, before = -1.0, -2.0
    while used < 1 or used != before:
        time.sleep(1)
        for pid in server.pids("standby"):
            before, used = used, _processor_seconds(pid)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main() -> None:
    """Both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of each")
    parser.add_argument("arguments", nargs="*", help="for `frame serve`, after --")
    options = parser.parse_args()
    report = {
        name: measure([*options.arguments, *more], options.kills)
        for name, more in (("standing by", ()), ("none", ("--no-standby-engine",)))
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
