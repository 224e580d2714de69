"""The client process of `server_speed.py`: many streams, counted in the bytes of raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from array import array
from pathlib import Path
from typing import Any

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
#: From the last stream's first token to the next step, so that the client can take the time.
SETTLE_SECONDS = 0.5
EVENT = b"data: {"
USAGE = re.compile(rb'"completion_tokens":(\d+)')
TICK = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def cpu_seconds(pids: list[int]) -> tuple[float, float]:
    """User and kernel time of processes so far."""
    user = kernel = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user, kernel = user + int(fields[11]), kernel + int(fields[12])
    return user / TICK, kernel / TICK


def memory_kib(pids: list[int]) -> float:
    """Resident memory of processes."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * PAGE_KIB


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

    def __init__(self, num_streams: int, pids: list[int]) -> None:
        self._pids = pids
        self._memory = memory_kib(pids)
        self._num_streams = num_streams
        self._num_begun = self._num_ended = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start = self.user = self.kernel = self.wall = self.growth = 0.0
        self._user = self._kernel = 0.0
        self.measuring = False

    def begun(self) -> None:
        """A stream has its first event; the clock starts with the last one's."""
        self._num_begun += 1
        if self._num_begun == self._num_streams:
            asyncio.get_running_loop().call_later(SETTLE_SECONDS / 2, self._measure)

    def _measure(self) -> None:
        self.measuring = True
        self._user, self._kernel = cpu_seconds(self._pids)
        self._start, self.growth = time.perf_counter() + SETTLE_SECONDS / 2, memory_kib(self._pids) - self._memory

    def ended(self) -> None:
        """A stream has ended; the clock stops with the last one."""
        self._num_ended += 1
        if self._num_ended == self._num_streams and not self._done.done():
            self.wall, (user, kernel) = time.perf_counter() - self._start, cpu_seconds(self._pids)
            self.user, self.kernel = user - self._user, kernel - self._kernel
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


def main(arguments: list[str]) -> int:
    """One run: prints a JSON line."""
    host, port, processes, route, num_streams, num_tokens, period = arguments
    pids = [int(pid) for pid in processes.split(",")]
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
        client = Client(int(num_streams), pids)
        streams = await client.run(host, int(port), request)
        gaps = sorted(gap for stream in streams for gap in stream.gaps[1:])  # the first one is the settling
        return {
            "tokens": sum(stream.num_tokens - 1 for stream in streams),
            "events": sum(stream.num_events for stream in streams),
            "user": client.user,
            "kernel": client.kernel,
            "memory": client.growth / len(streams),
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


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
