"""The list of servers: addresses on the command line, or a file with one a line, which is read again when it changes.

A line is `URL [prefill] [drain] [events=ADDRESS [replay=ADDRESS] [ranks=N]]`; what follows `#` is a comment. Raises
`ConfigError`, one sentence.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from frame.core.config.errors import ConfigError, near
from frame.kv_events.addresses import of_rank, problem
from frame.quoting import quoted

from .policy import ServerRole

#: Most servers of a list, and most bytes of its file.
MOST_SERVERS, _MOST_BYTES = 256, 1 << 20
_WORDS = ("prefill", "drain")
_NAMES = ("events", "replay", "ranks")
#: Most data ranks of a server.
_MOST_RANKS = 64


class EventAddresses(NamedTuple):
    """Where a server publishes KV events, and can be asked for them again: of its first data rank, of `num_ranks`."""

    events: str
    replay: str | None = None
    num_ranks: int = 1

    def of_ranks(self) -> list[tuple[int, str, str | None]]:
        """Rank and addresses of each."""
        again = self.replay
        return [
            (rank, of_rank(self.events, rank), None if again is None else of_rank(again, rank))
            for rank in range(self.num_ranks)
        ]


class ListedServer(NamedTuple):
    """A server as the list names it. A `draining` one gets no new requests."""

    url: str
    role: ServerRole = "serve"
    draining: bool = False
    kv_events: EventAddresses | None = None


def server_url(text: str) -> str:
    """The address with its scheme and without a slash at its end: HOST:PORT, or a URL of http or https."""
    written = text if "://" in text else f"http://{text}"
    if "@" in written:  # what stands before it may be secret
        raise ConfigError("what holds an @ is no address of a server: keys do not belong there, but to --server-key")
    try:
        parts = urlsplit(written)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{quoted(text)} is no address of a server: its host or port is none") from None
    wrong = (
        (parts.scheme not in ("http", "https"), "write http://HOST:PORT or https://HOST:PORT"),
        (not host, "it names no host"),
        (port == 0 or parts.netloc.endswith(":"), "its port is none"),
        (bool(parts.query or parts.fragment or "?" in written or "#" in written), "it ends before any ? or #"),
        (parts.path.rstrip("/").endswith("/v1"), "/v1 does not belong there, since requests' own paths have it"),
        (not written.isascii() or not written.isprintable() or " " in written, "it holds characters that no URL has"),
    )
    if reason := next((why for is_so, why in wrong if is_so), None):
        raise ConfigError(f"{quoted(text)} is no address of a server: {reason}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def listed(
    urls: Sequence[str],
    prefills: Sequence[str] = (),
    events: Sequence[str] = (),
    replays: Sequence[str] = (),
    ranks: str = "1",
) -> list[ListedServer]:
    """The servers that the command line names; addresses of KV events are in the order of all servers."""
    both = [(url, "serve") for url in urls] + [(url, "prefill") for url in prefills]
    for flag, addresses in (("--kv-events", events), ("--kv-events-replay", replays)):
        if addresses and len(addresses) != len(both):
            raise ConfigError(f"{flag} has {len(addresses)} addresses for {len(both)} servers; give each one")
    found = []
    for place, (url, role) in enumerate(both):
        own = events[place] if events else None, replays[place] if replays else None
        one = event_addresses(*own, ranks, names=("--kv-events", "--kv-events-replay", "--kv-events-ranks"))
        found.append(ListedServer(server_url(url), cast("ServerRole", role), kv_events=one))
    return checked(found)


def event_addresses(
    events: str | None, replay: str | None = None, ranks: str = "1", names: tuple[str, str, str] = _NAMES
) -> EventAddresses | None:
    """The addresses as they are written, by what the sentences call them; raises `ConfigError`."""
    if not (ranks.isascii() and ranks.isdigit() and len(ranks) < 4 and 0 < int(ranks) <= _MOST_RANKS):
        raise ConfigError(f"{names[2]} must be a whole number from 1 to {_MOST_RANKS}, got {quoted(ranks)}")
    if events is None:
        if replay is not None:
            raise ConfigError(f"{names[1]} needs {names[0]}, the address at which KV events are published")
        return None
    for name, address in zip(names, (events, replay), strict=False):
        if address is not None and (sentence := problem(name, address, int(ranks) - 1, listens=False)):
            raise ConfigError(sentence)
    return EventAddresses(events, replay, int(ranks))


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
        named = {}
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if equals and name in _NAMES:
                named[name] = value
            elif word not in _WORDS:
                raise ConfigError(
                    f"line {number} says {quoted(word)}{near(name, (*_WORDS, *_NAMES))}; after it may stand prefill, "
                    "drain, events=ADDRESS, replay=ADDRESS and ranks=NUMBER"
                )
        try:
            url = server_url(words[0])
            events = event_addresses(named.get("events"), named.get("replay"), named.get("ranks", "1"))
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
        return [ListedServer(url, "prefill" if "prefill" in words[1:] else "serve", "drain" in words[1:], events)]


def _unwaiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
