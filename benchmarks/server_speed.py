"""What streaming a token costs the API process: `frame serve` over an engine that emits at once, and a light client.

    python benchmarks/server_speed.py                                # both routes, 1 to 1000 streams
    python benchmarks/server_speed.py --routes chat --streams 64 --profile /tmp/api.prof
    python benchmarks/server_speed.py --rate 4000   # as slow as most engines, so that no deltas merge

Parent and API process are those of `frame serve`; the engine process repeats a text of the demo tokenizer, one token
for each stream and step, once every stream has its first token. Each run counts the API process's CPU seconds (/proc)
from then to the end of all streams: admission is left out, and other programs on the machine matter less. The client
counts events in the bytes of raw sockets; tokens are those of the streams' own usage. A stream that lags gets several
tokens in one event, so the tokens of an event are reported, too: compare costs of a token only where those are alike.
"""

from __future__ import annotations

import argparse
import asyncio
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
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
#: From the last stream's first token to the next step, so that the client can take the time.
SETTLE_SECONDS = 0.5
EVENT = b"data: {"
USAGE = re.compile(rb'"completion_tokens":(\d+)')
COLUMNS = (
    "route", "streams", "tokens a CPU second", "µs CPU a token", "tokens an event", "tokens/s", "step, ms",
    "p50 between events, ms", "p99, ms",
)  # fmt: skip
TICK = os.sysconf("SC_CLK_TCK")


def run_server(arguments: list[str]) -> int:
    """`frame serve` with that engine."""
    from frame.core.config.flag_parser import FlagParser
    from frame.core.config.flags import add_config_flags, config_from_arguments
    from frame.core.logging import configure_logging
    from frame.core.server.launcher import launch

    parser = FlagParser(prog="server_speed")
    add_config_flags(parser)
    configure_logging("warning")
    return launch(
        config_from_arguments(parser.parse_args(arguments)),
        [sys.executable, str(Path(__file__).with_name("speed_engine.py"))],
    )


# ---- the client process


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


class Stream(asyncio.Protocol):
    """One request on a connection of its own; counts events as bytes arrive."""

    def __init__(self, request: bytes, client: Client) -> None:
        self._request = request
        self._client = client
        self._rest = b""
        self._last = 0.0
        self.num_events = 0
        self.num_tokens = 0
        self.gaps = array("d")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asks."""
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Counts the events in `data`, and takes the time since the last ones."""
        now = time.perf_counter()
        whole = self._rest + data
        count = whole.count(EVENT)
        self._rest = whole[1 - len(EVENT) :]
        if b"data: [DONE]" in whole:
            found = USAGE.findall(whole)
            self.num_tokens = int(found[-1]) if found else 0
            self._client.ended()
        elif count:
            if not self.num_events:
                self._client.begun()
            elif self._client.measuring:
                self.gaps.append(now - self._last)
            self._last = now
        self.num_events += count

    def connection_lost(self, error: Exception | None) -> None:
        """Fails a stream that did not end."""
        if not self.num_tokens:
            self._client.failed(f"a stream ended early: {self._rest!r} {error or ''}")


class Client:
    """All streams of one run."""

    def __init__(self, num_streams: int, pid: int) -> None:
        self._pid = pid
        self._num_streams = num_streams
        self._num_begun = self._num_ended = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cpu = self._start = self.cpu = self.wall = 0.0
        self.measuring = False

    def begun(self) -> None:
        """A stream has its first event; the clock starts with the last one's."""
        self._num_begun += 1
        if self._num_begun == self._num_streams:
            asyncio.get_running_loop().call_later(SETTLE_SECONDS / 2, self._measure)

    def _measure(self) -> None:
        self.measuring = True
        self._cpu, self._start = cpu_seconds(self._pid), time.perf_counter() + SETTLE_SECONDS / 2

    def ended(self) -> None:
        """A stream has ended; the clock stops with the last one."""
        self._num_ended += 1
        if self._num_ended == self._num_streams and not self._done.done():
            self.wall, self.cpu = time.perf_counter() - self._start, cpu_seconds(self._pid) - self._cpu
            self._done.set_result(None)

    def failed(self, error: str) -> None:
        """The run is worth nothing."""
        if not self._done.done():
            self._done.set_exception(RuntimeError(error))

    async def run(self, host: str, port: int, request: bytes) -> list[Stream]:
        """Opens the streams and returns them when all have ended."""
        loop = asyncio.get_running_loop()
        streams = [Stream(request, self) for _ in range(self._num_streams)]
        pairs = [await loop.create_connection(lambda s=stream: s, host, port) for stream in streams]  # type: ignore[misc]
        try:
            await self._done
        finally:
            for transport, _ in pairs:
                transport.abort()
        return streams


def run_client(arguments: list[str]) -> int:
    """One run: prints a JSON line."""
    host, port, pid, route, num_streams, num_tokens, period = arguments
    body: dict[str, Any] = {
        "max_tokens": int(num_tokens),
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"streams": int(num_streams), "period": float(period), "settle": SETTLE_SECONDS},
    }
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if route == "chat" else {"prompt": "Hello"}
    data = json.dumps(body).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def measure() -> dict[str, Any]:
        client = Client(int(num_streams), int(pid))
        streams = await client.run(host, int(port), request)
        gaps = sorted(gap for stream in streams for gap in stream.gaps[1:])  # the first one is the settling
        return {
            "tokens": sum(stream.num_tokens - 1 for stream in streams),
            "events": sum(stream.num_events for stream in streams),
            "cpu": client.cpu,
            "wall": client.wall,
            "p50": gaps[len(gaps) // 2] if gaps else 0.0,
            "p99": gaps[len(gaps) * 99 // 100] if gaps else 0.0,
        }

    with contextlib.suppress(ImportError):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            print(json.dumps(runner.run(measure())))
        return 0
    print(json.dumps(asyncio.run(measure())))
    return 0


# ---- the measurement

#: Runs before anything else in each Python process of the server.
_PROFILE = """
import atexit, cProfile, sys
if "api" in sys.orig_argv:
    profile = cProfile.Profile()
    atexit.register(profile.dump_stats, {path!r})
    profile.enable()
"""


@contextlib.contextmanager
def serving(profile: Path | None) -> Iterator[tuple[str, str, int]]:
    """Host and port of a server, and its API process."""
    command = [sys.executable, __file__, "server", "--port", "0", "--disable-access-log"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        if profile is not None:
            (Path(folder) / "sitecustomize.py").write_text(_PROFILE.format(path=str(profile.absolute())))
            environment["PYTHONPATH"] = folder
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            yield _ready(process, Path(f"/proc/self/fd/{log.fileno()}"))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _ready(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str, int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"serving .* at http://([^:\s]+):(\d+)", log.read_text(errors="replace"))
        if match:
            return match.group(1), match.group(2), _api_process(process.pid)
        time.sleep(0.1)
    raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')}")


def _api_process(parent: int) -> int:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"\0api\0" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise SystemExit("the server has no API process")


def main() -> None:
    """Measures and prints one row of a table for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routes", nargs="+", choices=list(ROUTES), default=list(ROUTES))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=60000, help="tokens of a run, of all its streams together")
    parser.add_argument("--rate", type=float, default=20000, help="tokens/s that the engine emits, of all streams")
    parser.add_argument("--period", type=float, help="seconds of a step, instead of --rate; 0: as fast as it can")
    parser.add_argument("--profile", type=Path, help="where the API process leaves its cProfile statistics")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    with serving(options.profile) as (host, port, pid):
        for route in options.routes:
            for streams in options.streams:
                period = max(0.001, streams / options.rate) if options.period is None else options.period
                length = max(20, min(5000, options.tokens // streams))
                run = [host, port, pid, route, streams, length, period]
                command = [sys.executable, __file__, "client", *map(str, run)]
                out = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
                _show(route, streams, period, json.loads(out.stdout))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def _show(route: str, streams: int, period: float, run: dict[str, Any]) -> None:
    tokens, cpu = run["tokens"], max(run["cpu"], 1 / TICK)
    # besides the measured ones a stream has the first, the last, and in chats the one with the role
    events = max(1, run["events"] - streams * (3 if route == "chat" else 2))
    cells = [
        route, streams, f"{tokens / cpu:,.0f}", f"{1e6 * cpu / tokens:.0f}", f"{tokens / events:.1f}",
        f"{tokens / run['wall']:,.0f}", f"{1e3 * period:.1f}", f"{1e3 * run['p50']:.1f}", f"{1e3 * run['p99']:.1f}",
    ]  # fmt: skip
    print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    roles = {"server": run_server, "client": run_client}
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        raise SystemExit(roles[sys.argv[1]](sys.argv[2:]))
    main()
