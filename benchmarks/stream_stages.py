"""What each stage of a streamed token costs, from the engine's message to the client's socket, in one process.

    python benchmarks/stream_stages.py                # 64 streams
    python benchmarks/stream_stages.py --streams 1000 --steps 60

Each line includes the ones above it. Steps of one token for each stream are handed to the text side one by one, with
all streams keeping up, so every token is an event of its own. A figure is the CPU time of the thread for a step, over
its streams: the cheapest step and the median one. The cheapest hardly knows what else the machine does; the median
does. The last lines write to sockets that another process reads, the kernel's share included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from speed_client import ROUTES
from speed_engine import TEXT

#: Turns of the event loop after which a step has reached every socket.
_TURNS = 4
_MAX_TOKENS = 50_000
_PARAMS = {"max_tokens": _MAX_TOKENS, "ignore_eos": True}


def _read(port: int, route: str, num_streams: int) -> int:
    """The reading process: opens the streams and reads until it is ended."""
    body: dict[str, Any] = {**_PARAMS, "stream": True}
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if route == "chat" else {"prompt": "Hello"}
    data = json.dumps(body).encode()
    head = f"POST {ROUTES[route]} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"

    class Reader(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def read() -> None:
        for _ in range(num_streams):
            await asyncio.get_running_loop().create_connection(Reader, "127.0.0.1", port)
        await asyncio.Event().wait()

    asyncio.run(read())
    return 0


class Stages:
    """The parts of an API process over an engine client that emits what it is told."""

    def __init__(self, num_streams: int, num_steps: int) -> None:
        from frame.core.config.checkpoint import read_checkpoint
        from frame.core.config.tree import FrameConfig
        from frame.core.front.async_front import AsyncFront
        from frame.core.front.output_parsers import build_parsers
        from frame.core.front.tokenizer import TokenizerSource
        from frame.core.interfaces.client import EngineInfo
        from frame.core.plugin_host.registry import Registry
        from frame.core.processes.client import RemoteEngine
        from frame.core.server.app import build_app, make_endpoints
        from frame.core.server.serving import ServingHost

        info = EngineInfo(
            max_model_len=65536, vocab_size=32000, num_blocks=1, block_size=16, platform="fake", attention=["fake"],
            dtype="float32",
        )  # fmt: skip
        names = self._names = list[str]()

        class Client(RemoteEngine):
            error = None
            info = property(lambda self: info)  # type: ignore[assignment]

            async def add(self, request: Any) -> None:
                names.append(request.request_id)

            async def abort(self, request_ids: Any) -> None:
                pass

        self._num_streams, self._num_steps = num_streams, num_steps
        config, registry, self._client = FrameConfig(), Registry.load(), Client()
        checkpoint = read_checkpoint(config)
        source = TokenizerSource(config, checkpoint, registry)
        self._ids = source.get().encode(TEXT, add_special_tokens=False)
        self._llm = AsyncFront(config, self._client, checkpoint, registry, source)
        self._host = ServingHost(config, self._client)
        self._host.open(self._llm, build_parsers(self._llm.front))
        endpoints = [one for one in make_endpoints(config, registry, self._host) if not one.admin]
        self._app, _ = build_app(config, self._host, endpoints)
        self._settings = config.server.model_copy(update={"disable_access_log": True})

    async def run(self) -> None:
        """Prints a row for each stage."""
        from frame import RequestOutputKind, SamplingParams

        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **_PARAMS)
        print("| stage | cheapest step, µs a token | median step |\n|---|---|---|")
        await self._tasks("decoding, text side, `AsyncFront.stream`", lambda n: self._llm.stream([5, 6], params, n))
        await self._tasks("… and what the server watches", lambda n: self._host.generation.generate([5, 6], params, n))
        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        from frame.core.server.http import make_server

        server = make_server(self._app, self._settings)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        for route in ROUTES:
            port = str(listener.getsockname()[1])
            command = [sys.executable, __file__, "read", port, route, str(self._num_streams)]
            reader = subprocess.Popen(command)
            try:
                await self._measure(f"… and events of {ROUTES[route]}, into sockets")
            finally:
                reader.kill()
                reader.wait()
            await asyncio.sleep(0.5)
        server.should_exit = server.force_exit = True
        await serving

    async def _tasks(self, stage: str, stream: Callable[[str], Any]) -> None:
        async def drain(number: int) -> None:
            async for _ in stream(f"{stage} {number:032}"):
                pass

        tasks = [asyncio.create_task(drain(number)) for number in range(self._num_streams)]
        await self._measure(stage)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self, stage: str) -> None:
        from frame.core.interfaces.engine import EngineOutput
        from frame.core.interfaces.wire import decode, encode
        from frame.core.processes.messages import FromEngine, Outputs

        while len(self._names) < self._num_streams:
            await asyncio.sleep(0.01)
        costs = []
        for step in range(self._num_steps):
            token = self._ids[step % len(self._ids)]
            data = encode(Outputs([EngineOutput(request_id=name, token_ids=[token]) for name in self._names]))
            start = time.thread_time()
            self._client._take(decode(data, FromEngine))
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            costs.append((time.thread_time() - start) / self._num_streams)
            await asyncio.sleep(0.002)
        self._names.clear()
        costs.sort()
        print(f"| {stage} | {1e6 * costs[0]:.1f} | {1e6 * costs[len(costs) // 2]:.1f} |", flush=True)


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        from uvloop import new_event_loop as loop_factory  # type: ignore[no-redef]

    async def measure() -> None:
        work: Awaitable[None] = Stages(options.streams, options.steps).run()
        await work

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(measure())
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        raise SystemExit(_read(int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    main()
