"""What streaming a token costs the API process: `frame serve` over an engine that emits at once, and a light client.

    python benchmarks/server_speed.py                                # both routes, 1 to 1000 streams
    python benchmarks/server_speed.py --rate 4000     # as slow as most engines, so that no deltas merge
    python benchmarks/server_speed.py --period 0.05   # steps of one length, so that times between events compare
    python benchmarks/server_speed.py --pin           # the API process alone on one core, all else on the others
    python benchmarks/server_speed.py --routes chat --streams 64 --profile /tmp/api.prof

Parent and API processes are those of `frame serve`; the engine process repeats a text of the demo tokenizer, one token
for each stream and step, once every stream has its first token. Each run counts the CPU seconds of the API processes
(/proc, the kernel's part apart) from then to the end of all streams: admission, engine and client are left out, and
other programs on the machine matter less. Over loopback, sending includes the receiver's share of TCP. The client
counts events in the bytes of raw sockets; tokens are those of the streams' own usage. A stream that lags gets several
tokens in one event, so the tokens of an event are reported, too: compare costs of a token only where those are alike.
Memory is what the API processes have grown by when every stream has begun.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import speed_client
from speed_client import ROUTES, TICK

COLUMNS = (
    "route", "streams", "tokens a CPU second", "µs CPU a token (kernel)", "tokens an event", "tokens/s", "step, ms",
    "p50 between events, ms", "p99, ms", "KiB a stream",
)  # fmt: skip


def run_server(arguments: list[str]) -> int:
    """`frame serve` with that engine."""
    from frame.core.config.flag_parser import FlagParser
    from frame.core.config.flags import add_config_flags, config_from_arguments
    from frame.core.processes.launcher import launch
    from frame.core.startup.logging import configure_logging

    parser = FlagParser(prog="server_speed")
    add_config_flags(parser)
    configure_logging("warning")
    return launch(
        config_from_arguments(parser.parse_args(arguments)),
        [sys.executable, str(Path(__file__).with_name("speed_engine.py"))],
    )


#: Runs before anything else in each Python process of the server.
_PROFILE = """
import atexit, cProfile, sys
if "api" in sys.orig_argv:
    profile = cProfile.Profile()
    atexit.register(profile.dump_stats, {path!r})
    profile.enable()
"""


@contextlib.contextmanager
def serving(num_processes: int = 1, profile: Path | None = None) -> Iterator[tuple[str, str, list[int]]]:
    """Host and port of a server, and its API processes."""
    command = [sys.executable, __file__, "server", "--port", "0", "--disable-access-log"]
    command += ["--api-server-count", str(num_processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        if profile is not None:
            (Path(folder) / "sitecustomize.py").write_text(_PROFILE.format(path=str(profile.absolute())))
            environment["PYTHONPATH"] = folder
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            host, port = _ready(process, Path(f"/proc/self/fd/{log.fileno()}"))
            yield host, port, _api_processes(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _ready(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"serving .* at http://([^:\s]+):(\d+)", log.read_text(errors="replace"))
        if match:
            return match.group(1), match.group(2)
        time.sleep(0.1)
    raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')}")


def _api_processes(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"\0api\0" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _pin(pids: list[int]) -> None:
    """Gives each API process a core, and what else runs here the rest."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= len(pids):
        raise SystemExit(f"--pin needs a core for each API process and one for all else; there are {len(cores)}")
    for pid, core in zip(pids, cores, strict=False):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})
    rest = set(cores[len(pids) :])
    os.sched_setaffinity(0, rest)
    for parent in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if int(child) not in pids:
                for thread in Path(f"/proc/{child}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), rest)


def main() -> None:
    """Measures and prints one row of a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=60000, help="tokens of a run, of all its streams together")
    parser.add_argument("--rate", type=float, default=20000, help="tokens/s that the engine emits, of all streams")
    parser.add_argument("--period", type=float, help="seconds of a step, instead of --rate; 0: as fast as it can")
    parser.add_argument("--api-server-count", type=int, default=1, help="API processes")
    parser.add_argument("--pin", action="store_true", help="each API process on a core of its own")
    parser.add_argument("--profile", type=Path, help="where the API process leaves its cProfile statistics")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    with serving(options.api_server_count, options.profile) as (host, port, pids):
        if options.pin:
            _pin(pids)
        for route in options.routes:
            for streams in options.streams:
                period = max(0.001, streams / options.rate) if options.period is None else options.period
                length = max(20, min(5000, options.tokens // streams))
                run = [host, port, ",".join(map(str, pids)), route, streams, length, period]
                command = [sys.executable, speed_client.__file__, *map(str, run)]
                out = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
                _show(route, streams, period, json.loads(out.stdout))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def _show(route: str, streams: int, period: float, run: dict[str, Any]) -> None:
    tokens, cpu = run["tokens"], max(run["user"] + run["kernel"], 1 / TICK)
    # besides the measured ones a stream has the first, the last, and in chats the one with the role
    events = max(1, run["events"] - streams * (3 if route == "chat" else 2))
    cells = [
        route, streams, f"{tokens / cpu:,.0f}", f"{1e6 * cpu / tokens:.0f} ({1e6 * run['kernel'] / tokens:.0f})",
        f"{tokens / events:.2f}", f"{tokens / run['wall']:,.0f}", f"{1e3 * period:.1f}",
        f"{1e3 * run['p50']:.1f}", f"{1e3 * run['p99']:.1f}", f"{run['memory']:.0f}",
    ]  # fmt: skip
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        raise SystemExit(run_server(sys.argv[2:]))
    main()
