"""Which URLs are fetched. No test leaves the machine."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from frame.plugins.batches import fetch
from frame.plugins.batches.fetch import FetchError, FetchRules, checked_address, download, parse_url

RULES = FetchRules()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/a",
        "example.com/a",
        "http://",
        "http://user@example.com/",
        "http://user:word@example.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com /",
        "http://example.com/a b",
        "http://example.com/\n",
        "http://exämple.com/",
        "http://example.com:0/",
        "http://example.com:99999/",
        "http://[::1/",
    ],
)
def test_urls_that_parsers_may_read_differently(url: str) -> None:
    with pytest.raises(FetchError):
        parse_url(url, RULES)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1", "fc00::1", "2002:7f00:1::", "64:ff9b::7f00:1",
        "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0x7f.1", "localhost",
    ],
)  # fmt: skip
def test_private_addresses_in_any_spelling(host: str) -> None:
    with pytest.raises(FetchError):
        checked_address(host, 80, RULES)


class Network:
    """Stands for the module `socket` in the code under test, and for nobody else."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = iter(answers), list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in next(self.answers)]

    def create_connection(self, address: Any, *_: Any) -> Any:
        self.asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")


def test_all_addresses_of_a_name_count(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ["93.184.216.34", "10.0.0.1"]
    monkeypatch.setattr(fetch, "socket", Network(two[:1], two, two))
    assert checked_address("example.com", 80, RULES) == "93.184.216.34"
    with pytest.raises(FetchError, match=r"private address 10\.0\.0\.1"):
        checked_address("example.com", 80, RULES)
    assert checked_address("example.com", 80, FetchRules(private=True)) == "93.184.216.34"


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(["93.184.216.34"], ["127.0.0.1"])  # a name that means something else the second time
    monkeypatch.setattr(fetch, "socket", network)
    with pytest.raises(FetchError, match="Connection refused"):
        list(download("http://example.com/a", RULES))
    assert network.asked == [("93.184.216.34", 80)]


def test_hosts_may_be_limited() -> None:
    rules = FetchRules(hosts=frozenset(("files.example.com",)))
    assert parse_url("https://FILES.example.com/a?b=c", rules).hostname == "files.example.com"
    with pytest.raises(FetchError, match="not allowed; there are: files"):
        parse_url("https://other.example.com/", rules)


@pytest.mark.parametrize(
    ("answer", "pause", "seconds", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", 0.0, 60.0, "broke before the whole file"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + b"a" * 100, 0.02, 0.2, r"within 0\.2 seconds"),
    ],
)
def test_what_ends_early_or_trickles_is_an_error(answer: bytes, pause: float, seconds: float, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                head, _, body = answer.partition(b"\r\n\r\n")
                connection.recv(4096)
                connection.sendall(head + b"\r\n\r\n")
                for byte in body:
                    connection.sendall(bytes([byte]))
                    time.sleep(pause)

        thread = threading.Thread(target=serve)
        thread.start()
        rules = FetchRules(private=True, seconds=seconds)
        with pytest.raises(FetchError, match=message):
            list(download(f"http://127.0.0.1:{listener.getsockname()[1]}/a", rules))
        thread.join()
