"""Downloads and uploads of remote files that cannot be led to forbidden addresses.

Only http and https; the connection goes to the very address that was checked; redirects are refused, private and other
special addresses unless they were allowed; bytes and seconds are bounded. Knows no caller.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO
from urllib.parse import SplitResult, urlsplit

from frame.quoting import quoted

_CHUNK_BYTES = 1 << 16
_BROKE = "the connection broke before the whole file had arrived"
#: Characters about which URL parsers disagree.
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]|[^\x00-\x7f]")
#: Characters that some parsers escape in the name of a host and others leave.
_NO_HOST = re.compile(r"[\"<>^`{|}]")
#: Spellings of IPv4 addresses that some resolvers read as numbers: decimal, octal, hexadecimal, shortened.
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?", re.IGNORECASE)


class FetchError(Exception):
    """The URL is refused or does not answer; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """What may be fetched. `hosts` None allows every public one; `private` also allows private addresses."""

    hosts: frozenset[str] | None = None
    private: bool = False
    max_bytes: int = 1 << 30
    seconds: float = 600.0


def parse_url(url: str, rules: FetchRules) -> SplitResult:
    """The parts of a URL that may be used; raises `FetchError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise FetchError(f"{quoted(url)} is not a URL") from None
    if _AMBIGUOUS.search(url) or _NO_HOST.search(parts.netloc):
        raise FetchError(f"URL {quoted(url)} holds a character that must be escaped")
    if parts.scheme not in ("http", "https"):
        raise FetchError(f"URL {quoted(url)} must begin with http:// or https://")
    if not host or port == 0 or parts.username is not None or parts.password is not None:
        raise FetchError(f"URL {quoted(url)} must have a host, and neither user nor password")
    if rules.hosts is not None and host not in rules.hosts:
        raise FetchError(f"host {quoted(host)} is not allowed; there are: {', '.join(sorted(rules.hosts)) or 'none'}")
    return parts


def checked_address(host: str, port: int, rules: FetchRules) -> str:
    """An address of a host that may be connected to; raises `FetchError` when any of them may not."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
            raise FetchError(f"{quoted(host)} is neither a host name nor a plain IP address") from None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FetchError(f"host {quoted(host)} cannot be resolved") from None
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    for address in addresses:
        if not rules.private and not _is_public(address):
            raise FetchError(f"host {quoted(host)} is at the private address {address}")
    return addresses[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            ip = inner
        elif ip in ipaddress.ip_network("64:ff9b::/96"):
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to the address that was checked, even if the name resolves differently by now."""

    address = ""

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)


class _PinnedTlsConnection(http.client.HTTPSConnection):
    address = ""

    def connect(self) -> None:
        raw = socket.create_connection((self.address, self.port), self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=self.host)


@contextmanager
def _request(
    url: str, rules: FetchRules, method: str, body: IO[bytes] | None = None, size: int = 0
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request, while its connection is open; raises `FetchError`."""
    parts = parse_url(url, rules)
    host = parts.hostname or ""
    kind = _PinnedTlsConnection if parts.scheme == "https" else _PinnedConnection
    connection = kind(host, parts.port, timeout=min(60.0, rules.seconds))
    connection.address = checked_address(host, connection.port, rules)
    headers = {"User-Agent": "frame", "Accept-Encoding": "identity"}
    if body is not None:
        headers |= {"Content-Length": str(size), "Content-Type": "application/jsonl"}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(connection):
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "strerror", None) or type(error).__name__
            raise FetchError(f"{host} does not answer: {cause}") from None
        if not 200 <= response.status < 300:
            redirects = 300 <= response.status < 400
            what = "redirects, which is not followed" if redirects else f"answers {response.status}"
            raise FetchError(f"{method} {host}{parts.path[:100]} {what}")
        yield response


def download(url: str, rules: FetchRules) -> Iterator[bytes]:
    """The bytes of a URL, chunk by chunk; raises `FetchError`."""
    end = time.monotonic() + rules.seconds
    size = 0
    with _request(url, rules, "GET") as response:
        while True:
            try:
                chunk = response.read1(
                    _CHUNK_BYTES
                )  # returns what has arrived, so that slow bytes do not outlast the time limit
            except (OSError, http.client.HTTPException):
                raise FetchError(_BROKE) from None
            if not chunk and response.length:
                raise FetchError(_BROKE)
            if not chunk:
                return
            size += len(chunk)
            if size > rules.max_bytes:
                raise FetchError(f"the file exceeds {rules.max_bytes} bytes")
            if time.monotonic() > end:
                raise FetchError(f"the file did not arrive within {rules.seconds:g} seconds")
            yield chunk


def upload(url: str, rules: FetchRules, body: IO[bytes], size: int) -> None:
    """PUTs `size` bytes; raises `FetchError`."""
    with _request(url, rules, "PUT", body, size):
        pass
