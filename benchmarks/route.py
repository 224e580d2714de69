"""What `frame route` adds to a request, beside the server asked directly and fronts made of a client library alone.

One client asks one request after another, in turns over all of them, on connections that stay open. The server answers
at once, with bytes that it has ready, so that what is measured is the way there and back.

    python benchmarks/route.py                      # whole answers and streams
    python benchmarks/route.py --libraries httpx aiohttp
    python benchmarks/route.py --load               # how much one front passes on
    python benchmarks/route.py --policies least-load text-prefix prefix --prompt-bytes 4000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import numpy as np

_BODY = b'{"model": "demo", "messages": [{"role": "user", "content": "%b"}], "max_tokens": 9}'
_PROMPT = b"Tell me about the sea."
_ANSWER = b'{"choices": [{"message": {"role": "assistant", "content": "The sea is wide and deep."}}], "usage": {}}'
_EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": " word"}}]}\n\n'
_EVENTS = 64
#: Seconds between two events: a token each millisecond.
_PACE = 0.001
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_HOP = (b"host", b"content-length", b"transfer-encoding", b"connection")


def body_of(prompt_bytes: int) -> bytes:
    """A chat with a prompt of about so many bytes."""
    return _BODY % (_PROMPT * max(1, prompt_bytes // len(_PROMPT)))


def tokens_of(prompt_bytes: int) -> list[int]:
    """What stands for the tokens of that prompt."""
    return list(range(prompt_bytes // 4))


def publish(port: int, prompt_bytes: int) -> Any:
    """Publishes that the prompt is cached, at the next two ports."""
    from frame.kv_events.publisher import Publisher, Sockets

    tokens = tokens_of(prompt_bytes)
    names = list(range(len(tokens) // 16))
    event = ["BlockStored", names, None, tokens[: 16 * len(names)], 16, None, "GPU"]
    endpoints = [f"tcp://127.0.0.1:{port + place}" for place in (1, 2)]
    publisher = Publisher(
        Sockets(endpoint=endpoints[0], replay_endpoint=endpoints[1]),
        lambda *_: msgspec.msgpack.encode([0.0, [event], 0]),
    )
    publisher.publish([])
    return publisher


def serve(port: int, prompt_bytes: int = 0) -> None:
    """The server: answers `/v1/chat/completions` whole, and any other path with events that carry the time."""
    import httptools

    publisher = publish(port, prompt_bytes) if prompt_bytes else None
    said = msgspec.json.encode({"tokens": tokens_of(prompt_bytes)})
    tokenized = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said)

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.parser = transport, httptools.HttpRequestParser(self)

        def on_url(self, url: bytes) -> None:
            self.whole = url == b"/v1/chat/completions" or not url.startswith(b"/v1/")
            self.answer = tokenized if url == b"/tokenize" else _JSON + _ANSWER

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_message_complete(self) -> None:
            if self.whole:
                self.transport.write(self.answer)
            else:
                self.transport.write(_STREAM)
                self.event(_EVENTS)

        def event(self, left: int) -> None:
            stamped = b": %d\n" % time.perf_counter_ns() + _EVENT
            self.transport.write(b"%x\r\n%b\r\n" % (len(stamped), stamped))
            if left:
                asyncio.get_running_loop().call_later(_PACE, self.event, left - 1)
            else:
                self.transport.write(b"0\r\n\r\n")

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", port)
        await server.serve_forever()

    try:
        asyncio.run(run())
    finally:
        if publisher is not None:
            publisher.close()


def front(library: str, port: int, url: str) -> None:
    """The least front that can be made of uvicorn and a client library: no keys, bounds, choice, retries or counts."""
    import uvicorn

    client: Any = None

    async def pieces(method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> AsyncIterator[Any]:
        """The status and the headers, then the pieces of the body."""
        nonlocal client
        if library == "httpx":
            import httpx

            client = client or httpx.AsyncClient(trust_env=False, timeout=600)
            async with client.stream(method, url + target, headers=headers, content=body) as answer:
                yield answer.status_code, answer.headers.raw
                async for piece in answer.aiter_raw():
                    yield piece
        else:
            import aiohttp

            client = client or aiohttp.ClientSession(auto_decompress=False)
            texts = [(name.decode(), value.decode()) for name, value in headers]
            async with client.request(method, url + target, headers=texts, data=body) as answer:
                yield answer.status, answer.raw_headers
                async for piece in answer.content.iter_any():
                    yield piece

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        kept = [header for header in scope["headers"] if header[0] not in _HOP]
        answer = pieces(scope["method"], scope["path"], kept, body)
        status, headers = await anext(answer)
        headers = [(name.lower(), value) for name, value in headers if name.lower() != b"transfer-encoding"]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for piece in answer:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False, lifespan="off", ws="none")


class Client:
    """A connection on which one request follows another."""

    def __init__(self, port: int, body: bytes = b"") -> None:
        self._body = body or body_of(0)
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _ask(self, path: bytes) -> None:
        head = b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAuthorization: Bearer key\r\n"
        self._socket.sendall(head % path + b"Content-Length: %d\r\n\r\n%b" % (len(self._body), self._body))

    def _more(self) -> bytes:
        if not (data := self._socket.recv(1 << 16)):
            raise SystemExit("the connection was closed")
        return data

    def whole(self) -> float:
        """Seconds until a whole answer is there."""
        began = time.perf_counter()
        self._ask(b"/v1/chat/completions")
        data = b""
        while not data.endswith(_ANSWER):
            data += self._more()
        return time.perf_counter() - began

    def stream(self) -> tuple[float, list[float]]:
        """Seconds until the first event is there, and from the moment that each was written until it is."""
        began = time.perf_counter()
        self._ask(b"/v1/stream")
        first, times, data = 0.0, list[float](), b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = self._more()
            now = time.perf_counter_ns()
            first = first or time.perf_counter() - began if b"data:" in data + piece else 0.0
            data += piece
            times += [(now - int(line[2:])) / 1e9 for line in piece.split(b"\n") if line.startswith(b": ")]
        return first, times


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[None]:
    """Processes that end with the benchmark."""
    started = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of several ports in a row that nobody uses now."""
    for _ in range(100):
        first = free_port()
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as probes:
            for place in range(count):
                probes.enter_context(socket.create_server(("127.0.0.1", first + place)))
            return first
    raise SystemExit(f"there are no {count} free ports in a row")


def wait_for(port: int, body: bytes = b"") -> Client:
    """A connection to a process that is starting."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            return Client(port, body)
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def measure(ports: dict[str, int], rounds: int, body: bytes = b"") -> None:
    """Prints milliseconds that each adds to the server asked directly."""
    clients = {name: wait_for(port, body) for name, port in ports.items()}
    for client in clients.values():
        for _ in range(200):
            client.whole()
        client.stream()
    kinds = ("whole answer", "first event", "each event")
    times: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in ports for kind in kinds}
    for _ in range(rounds):
        for name, client in clients.items():
            times[name, "whole answer"] += [client.whole() for _ in range(50)]
            first, events = client.stream()
            times[name, "first event"].append(first)
            times[name, "each event"] += events
    print(f"{'':<28}{'p50':>9}{'p90':>9}{'p99':>9}{'added at p50':>15}")
    for kind in kinds:
        least = np.percentile(times["server", kind], 50)
        for name in ports:
            p50, p90, p99 = np.percentile(times[name, kind], (50, 90, 99)) * 1e3
            print(f"{kind:<14}{name:<14}{p50:9.3f}{p90:9.3f}{p99:9.3f}{p50 - least * 1e3:15.3f}")


def load(ports: dict[str, int], seconds: float = 4.0) -> None:
    """Prints how many requests and events pass in a second when many clients ask all the time."""
    for path, end, connections in (
        (b"/v1/chat/completions", _ANSWER, 32),
        (b"/v1/stream", b"0\r\n\r\n", 64),
        (b"/v1/stream", b"0\r\n\r\n", 256),
    ):
        for name, port in ports.items():
            wait_for(port)
            rate = asyncio.run(_rate(port, path, end, connections, seconds))
            events = f", {rate * (_EVENTS + 1):,.0f} events" if path == b"/v1/stream" else ""
            print(f"{name:<14}{connections:4} connections: {rate:9,.0f} requests{events} a second")


async def _rate(port: int, path: bytes, end: bytes, connections: int, seconds: float) -> float:
    request = b"POST %b HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n" % path
    request += b"Content-Length: %d\r\n\r\n%b" % (len(body_of(0)), body_of(0))
    began, count = time.perf_counter(), 0

    async def ask() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < began + seconds:
            writer.write(request)
            data = b""
            while not data.endswith(end):
                data = data[-len(end) :] + await reader.read(1 << 16)
            count += 1
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    return count / (time.perf_counter() - began)


def measure_policies(names: list[str], rounds: int, prompt_bytes: int) -> None:
    """Fronts with these policies before two servers that both have the prompt cached."""
    first = free_ports(6)
    places = (first, first + 3)
    commands = [[sys.executable, __file__, "--serve", str(place), str(prompt_bytes)] for place in places]
    ports = {"server": first} | {name: free_port() for name in names}
    routing = [sys.executable, "-m", "frame", "route", *(f"http://127.0.0.1:{place}" for place in places)]
    routing += ["--kv-events", *(f"tcp://127.0.0.1:{place + 1}" for place in places)]
    routing += ["--kv-events-replay", *(f"tcp://127.0.0.1:{place + 2}" for place in places), "--disable-access-log"]
    with running(*commands):
        for place in places:
            wait_for(place)
        with running(*[[*routing, "--policy", name, "--port", str(ports[name])] for name in names]):
            measure(ports, rounds, body_of(prompt_bytes))
            for name in names:
                with urllib.request.urlopen(f"http://127.0.0.1:{ports[name]}/fleet") as answer:
                    print(name, msgspec.json.decode(answer.read())["figures"])


def main() -> None:
    """Starts everything and measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="Rounds of 50 whole answers and one stream of each.")
    parser.add_argument("--libraries", nargs="*", default=[], choices=("httpx", "aiohttp"), metavar="NAME")
    parser.add_argument("--load", action="store_true", help="Measure how much passes in a second instead.")
    parser.add_argument("--policies", nargs="*", default=[], metavar="NAME", help="Measure fronts with these instead.")
    parser.add_argument("--prompt-bytes", type=int, default=4000, metavar="N", help="For --policies; default: 4000.")
    parser.add_argument("--serve", type=int, nargs=2, metavar=("PORT", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--front", nargs=3, metavar="ARGUMENT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(*arguments.serve)
        return
    if arguments.front is not None:
        library, port, url = arguments.front
        front(library, int(port), url)
        return
    if arguments.policies:
        measure_policies(arguments.policies, arguments.rounds, arguments.prompt_bytes)
        return
    port = free_port()
    url, own = f"http://127.0.0.1:{port}", [sys.executable, __file__]
    ports = {"server": port} | {name: free_port() for name in ("frame route", "without log", *arguments.libraries)}
    routing = [sys.executable, "-m", "frame", "route", url, "--port"]
    commands = [[*own, "--front", name, str(ports[name]), url] for name in arguments.libraries]
    with running([*own, "--serve", str(port), "0"]):
        wait_for(port)
        commands += [[*routing, str(ports["frame route"])]]
        commands += [[*routing, str(ports["without log"]), "--disable-access-log"]]
        with running(*commands):
            if arguments.load:
                load(ports)
            else:
                measure(ports, arguments.rounds)


if __name__ == "__main__":
    main()
