"""The list of servers: addresses on the command line, or a file with one a line, which is read again when it changes.

A line is `URL [prefill] [drain]`; what follows `#` is a comment. Raises `ConfigError`, one sentence.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from frame.core.config.errors import ConfigError, near

from .policy import ServerRole

#: Most servers of a list, and most bytes of its file.
MOST_SERVERS, _MOST_BYTES = 256, 1 << 20
_WORDS = ("prefill", "drain")


class ListedServer(NamedTuple):
    """A server as the list names it. A `draining` one gets no new requests."""

    url: str
    role: ServerRole = "serve"
    draining: bool = False


def server_url(text: str) -> str:
    """The address with its scheme and without a slash at its end: HOST:PORT, or a URL of http or https."""
    written = text if "://" in text else f"http://{text}"
    if "@" in written:  # what stands before it may be secret
        raise ConfigError("what holds an @ is no address of a server: keys do not belong there, but to --server-key")
    try:
        parts = urlsplit(written)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{text!r} is no address of a server: its host or port is none") from None
    wrong = (
        (parts.scheme not in ("http", "https"), "write http://HOST:PORT or https://HOST:PORT"),
        (not host, "it names no host"),
        (port == 0 or parts.netloc.endswith(":"), "its port is none"),
        (bool(parts.query or parts.fragment or "?" in written or "#" in written), "it ends before any ? or #"),
        (not written.isascii() or not written.isprintable() or " " in written, "it holds characters that no URL has"),
    )
    if reason := next((why for is_so, why in wrong if is_so), None):
        raise ConfigError(f"{text!r} is no address of a server: {reason}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def listed(urls: Sequence[str], prefills: Sequence[str] = ()) -> list[ListedServer]:
    """The servers that the command line names."""
    return checked([*(ListedServer(server_url(url)) for url in urls)] + [
        ListedServer(server_url(url), "prefill") for url in prefills
    ])  # fmt: skip


def checked(servers: Iterable[ListedServer]) -> list[ListedServer]:
    """The servers, each of which is named once and of which one at least can answer."""
    found: dict[str, ListedServer] = {}
    for server in servers:
        if server.url in found:
            raise ConfigError(f"server {server.url} is listed twice")
        found[server.url] = server
    if not found:
        raise ConfigError("no server is listed; name addresses, as in http://127.0.0.1:8000, or --servers FILE")
    if len(found) > MOST_SERVERS:
        raise ConfigError(f"{len(found)} servers are listed, and there may be {MOST_SERVERS}")
    if all(server.role == "prefill" for server in found.values()):
        raise ConfigError("every listed server is for prefill only, so that none could answer")
    return list(found.values())


class ServerFile:
    """A list in a file. `read` gives its servers; `changed` says whether it may have others by now."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        self._state: object = None

    def changed(self) -> bool:
        """Whether the file is another than `read` has read last, or is gone."""
        return self._look() != self._state

    def _look(self) -> object:
        try:
            found = os.stat(self.path)
        except OSError as error:
            return error.errno
        return found.st_mtime_ns, found.st_size, found.st_ino

    def read(self) -> list[ListedServer]:
        """The servers that it lists now."""
        self._state = self._look()  # before reading, so that what is written meanwhile is read again
        try:
            # without waiting for whoever writes to a pipe
            with open(self.path, "rb", opener=_unwaiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConfigError(f"the list of servers {self.path} is no regular file")
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"the list of servers {self.path} cannot be read: {error.strerror or error}") from None
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"the list of servers {self.path} has more than {_MOST_BYTES} bytes")
        try:
            lines = data.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise ConfigError(f"the list of servers {self.path} is no UTF-8 text") from None
        try:
            return checked(server for number, line in enumerate(lines, 1) for server in self._server(number, line))
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def _server(self, number: int, line: str) -> list[ListedServer]:
        words = line.partition("#")[0].split()
        if not words:
            return []
        for word in words[1:]:
            if word not in _WORDS:
                raise ConfigError(
                    f"line {number} says {word!r}{near(word, _WORDS)}; after the address may stand prefill and drain"
                )
        try:
            url = server_url(words[0])
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
        return [ListedServer(url, "prefill" if "prefill" in words[1:] else "serve", "drain" in words[1:])]


def _unwaiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
