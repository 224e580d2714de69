"""How a decode engine finds a prefill engine by the address in its parameters, and tells where its blocks go.

`GET /query` at that address says who the engine is and where it listens, as proxies for vLLM's connector expect. There
the decode engine, which must know the secret, says which prompt it wants, and at which address it takes blocks.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from frame.quoting import quoted

from ..blocks.callers import Callers, listen
from ..blocks.remote import MAX_TEXT, ParamsError
from ..blocks.wire import PeerError
from ..nixl.wire import call
from ..push.facts import Facts
from ..push.inbox import MAX_CALLERS
from ..push.wire import Meet, No, Ready, meet_caller

_SECONDS = 5.0
_MAX_HEAD, _MAX_ANSWER = 16 << 10, 64 << 10


class Want(msgspec.Struct, frozen=True, tag=True):
    """The prompt for which `digest` stands is to be sent to `host` and `port`; or, with port 0, need not be sent."""

    digest: bytes
    host: str
    port: int

    def __post_init__(self) -> None:
        if len(self.digest) != 32 or not 0 < len(self.host) <= 512 or not 0 <= self.port < 65536:
            raise ValueError("it wants no prompt")


@dataclass(frozen=True)
class Source:
    """Where a request's parameters say that its prompt is computed; `engine` is "" where they do not say by whom."""

    engine: str
    host: str
    port: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Source:
        """From the parameters of a request; raises `ParamsError` where they lack something, or name it wrongly."""
        engine, name = params.get("remote_engine_id") or "", "remote_bootstrap_addr"
        if not isinstance(engine, str) or len(engine) > MAX_TEXT:
            raise ParamsError(
                "remote_engine_id", f"must be a text of at most {MAX_TEXT} characters, got {quoted(engine)}"
            )
        address, older = params.get(name), [params.get(f"bootstrap_server_{part}") for part in ("host", "port")]
        if address is None and older == [None, None]:
            raise ParamsError(name, "is missing")
        if address is None:
            name, address = "bootstrap_server_host and bootstrap_server_port", f"http://{older[0]}:{older[1]}"
        if (found := _host_and_port(address)) is None:
            raise ParamsError(name, f"must be an address such as http://HOST:PORT, got {quoted(address)}")
        return cls(engine, *found)


def _host_and_port(address: Any) -> tuple[str, int] | None:
    """Those of an address of http that names nothing else; None for another value."""
    if not isinstance(address, str) or len(address) > MAX_TEXT:
        return None
    try:
        found = urllib.parse.urlsplit(address)
        host, port = found.hostname, found.port
    except ValueError:
        return None
    whole = found.scheme == "http" and found.path in ("", "/") and not (found.query or found.username)
    return (host, port) if whole and host and port else None


class Bootstrap:
    """A prefill engine's two listeners, until `close`: `port` for everyone, and one for those who know the secret.

    `want` is called with each prompt that a decode engine wants, and says whether it may be sent. `facts` are those of
    the first worker. Raises `ValueError` when an address cannot be used.
    """

    def __init__(
        self, host: str, port: int, *, engine: str, secret: bytes, facts: Facts, want: Callable[[Want], bool]
    ) -> None:
        self._secret = secret
        self._facts = {0: facts}
        self._want = want
        front = listen(host, port, "mooncake", "bootstrap_port")
        back = listen(host, 0, "mooncake")
        self.port = int(front.getsockname()[1])
        name = f"[{host}]" if ":" in host else host
        place = f"tcp://{name}:{back.getsockname()[1]}"
        body = json.dumps({"0": {"engine_id": engine, "worker_addr": {"0": {"0": place}}}}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._answer = f"{head}Connection: close\r\n\r\n".encode() + body
        self._callers = [
            Callers(front, self._tell, most=MAX_CALLERS, name="mooncake"),
            Callers(back, self._listen, most=MAX_CALLERS, name="mooncake"),
        ]

    def close(self) -> None:
        """Closes the listeners and all connections."""
        for callers in self._callers:
            callers.close()

    def _tell(self, caller: socket.socket) -> None:
        head, latest = b"", time.monotonic() + _SECONDS
        while b"\r\n\r\n" not in head:
            caller.settimeout(max(latest - time.monotonic(), 1e-3))
            data = caller.recv(4096)
            head += data
            if not data or len(head) > _MAX_HEAD:
                return
        path = head.split(b" ", 2)[1] if head.startswith(b"GET ") else b""
        found = path.split(b"?")[0] == b"/query"
        caller.sendall(self._answer if found else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _listen(self, caller: socket.socket) -> None:
        channel = meet_caller(caller, self._secret, self._facts, _SECONDS).channel
        channel.send(Ready(), _SECONDS)
        kept = self._want(channel.receive(Want, _SECONDS))
        channel.send(Ready() if kept else No("the prompt was computed, and is not kept"), _SECONDS)


def ask(source: Source, secret: bytes, facts: Facts, want: Want, seconds: float) -> bool:
    """Tells the engine at `source` what is wanted, which may take so long in all. Raises `PeerError`.

    Returns False where the prompt was computed there and is not kept.
    """
    left = _Limit(seconds).left
    try:
        port = _query(source, left)
        with socket.create_connection((source.host, port), timeout=left()) as connection:
            channel = call(connection, secret, left())
            channel.send(Meet(facts, 0), left())
            answer = channel.receive(Ready | No, left())
            if isinstance(answer, No):
                raise PeerError(answer.reason)
            channel.send(want, left())
            return isinstance(channel.receive(Ready | No, left()), Ready)
    except (OSError, UnicodeError, HTTPException) as error:  # the second of a name that none can have
        raise PeerError(f"no answer: {error}") from None


class _Limit:
    """So many seconds, from now on."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._latest = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left. Raises `PeerError` where none are."""
        left = self._latest - time.monotonic()
        if left <= 0:
            raise PeerError(f"no answer within {self._seconds:g} s")
        return left


class _LimitedSocket(socket.socket):
    """Reads while something is `left`, however many bytes come at once."""

    left: Callable[[], float]

    def recv_into(self, *arguments: Any) -> int:
        self.settimeout(self.left())
        return super().recv_into(*arguments)


def _query(source: Source, left: Callable[[], float]) -> int:
    """The port for those who know the secret; its host is the one that was asked, whatever the answer says."""
    connection = HTTPConnection(source.host, source.port)
    try:
        plain = socket.create_connection((source.host, source.port), timeout=left())
        connection.sock = limited = _LimitedSocket(fileno=plain.detach())
        limited.left = left
        limited.settimeout(left())
        connection.request("GET", "/query")
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER)
    finally:
        connection.close()
    try:
        engines = [one for one in json.loads(body).values() if source.engine in ("", one["engine_id"])]
        port = urllib.parse.urlsplit(engines[0]["worker_addr"]["0"]["0"]).port if engines else 0
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise PeerError("it does not say where it listens") from None
    if not port:
        raise PeerError("it is another engine")
    return port
