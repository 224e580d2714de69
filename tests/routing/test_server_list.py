"""The list of servers, and what a front does when it or a server changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from frame.interfaces import KVChange, KVCleared, KVRemoved, Setup
from frame.kv_events.events import Cleared
from frame.kv_events.publisher import Publisher, Sockets
from frame.plugins.routing.least_load import LeastLoadPolicy
from frame.routing.fleet import FleetServer
from frame.routing.health import load_of
from frame.routing.server_list import EventAddresses, ListedServer, ServerFile, listed, server_url
from frame.settings import ConfigError
from tests.free_ports import free_ports
from tests.routing.fakes import CHAT, FakeServer, front, reply, servers, stream


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("http://a.example/", "http://a.example"),
        ("https://a.example:8443/base/", "https://a.example:8443/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "", "http://", "ftp://a:1", "a:99999", "a:b", "http://a:0", "http://u:p@a:1", "http://a:1/?x", "http://a:1/#x",
        "unix:/tmp/s", "http://a b:1", "http://ä:1", "http://[::1", "file:///etc/passwd", "http://a\n:1", ":8000",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server") as caught:
        server_url(text)
    assert "\n" not in str(caught.value)


def test_a_file_says_roles_and_who_drains(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("# ours\n\nhttp://a:1  # first\nb:2 prefill\nc:3 drain\nd:4 drain prefill\n")
    assert ServerFile(str(file)).read() == [
        ListedServer("http://a:1"),
        ListedServer("http://b:2", "prefill"),
        ListedServer("http://c:3", "serve", draining=True),
        ListedServer("http://d:4", "prefill", draining=True),
    ]


def test_a_file_says_where_events_are(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("a:1 events=tcp://a:5557 ranks=2 drain replay=tcp://a:5657\nb:2 prefill events=ipc:///run/x\nc:3\n")
    first, second, third = ServerFile(str(file)).read()
    assert first.draining
    assert first.kv_events is not None
    assert first.kv_events.of_ranks() == [
        (0, "tcp://a:5557", "tcp://a:5657"),
        (1, "tcp://a:5558", "tcp://a:5658"),
    ]
    assert (second.role, second.kv_events) == ("prefill", EventAddresses("ipc:///run/x"))
    assert third.kv_events is None


def test_the_command_line_names_events_in_the_order_of_servers() -> None:
    found = listed(["a:1"], ["b:2"], ["tcp://a:1", "tcp://b:2"], ["tcp://a:3", "tcp://b:4"], "3")
    assert [server.kv_events for server in found] == [
        EventAddresses("tcp://a:1", "tcp://a:3", 3),
        EventAddresses("tcp://b:2", "tcp://b:4", 3),
    ]
    with pytest.raises(ConfigError, match="--kv-events has 1 addresses for 2 servers; give each one"):
        listed(["a:1", "b:2"], [], ["tcp://a:1"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a:1 events=5557", "line 1: events '5557' is no address; write tcp://HOST:PORT"),
        (b"a:1 events=tcp://*:5557", "line 1: events tcp://*:5557 names no host; write the server's"),
        (
            b"a:1 events=tcp://a:65535 ranks=2",
            "line 1: events tcp://a:65535 has no port from 1 to 65535 for data rank 1",
        ),
        (b"a:1 events=inproc://x", "line 1: events 'inproc://x' is no address; write tcp://HOST:PORT or ipc:///PATH"),
        (b"a:1 replay=tcp://a:5557", "line 1: replay needs events"),
        (b"a:1 events=tcp://a:1 ranks=0", "line 1: ranks must be a whole number from 1 to 64, got '0'"),
        (b"a:1 event=tcp://a:1", "line 1 says 'event=tcp://a:1'"),
        (b"", "no server is listed"),
        (b"# nothing\n", "no server is listed"),
        (b"a:1\na:1\n", "server http://a:1 is listed twice"),
        (b"a:1\nb:2 prefil\n", "line 2 says 'prefil' (did you mean prefill?)"),
        (b"a:1\nftp://b\n", "line 2: 'ftp://b' is no address"),
        (b"a:1 prefill\n", "every listed server is for prefill only"),
        (b"\xff\xfe", "is no UTF-8 text"),
        (b"a:1\n" * 400_000, "more than 1048576 bytes"),
        ("\n".join(f"a:{n}" for n in range(1, 300)).encode(), "299 servers are listed, and there may be 256"),
    ],
)
def test_what_is_no_list_is_refused_in_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "servers.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ServerFile(str(file)).read()
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ServerFile(str(tmp_path / "none")).read()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"is no regular file|Is a directory"):
            ServerFile(str(path)).read()
    with pytest.raises(ConfigError, match="no server is listed"):
        listed([])


class Listening(LeastLoadPolicy):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(Setup())
        self.told: list[tuple[str, int, KVChange]] = []

    def kv_changed(self, server: str, rank: int, change: KVChange) -> None:
        self.told.append((server, rank, change))


async def test_events_of_a_changed_list_are_followed_and_those_of_servers_that_left_no_more(tmp_path: Path) -> None:
    file, policy, port = tmp_path / "servers.txt", Listening(), free_ports(2)
    where = [f"tcp://127.0.0.1:{port + place}" for place in range(2)]

    async def told(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                publisher.publish([Cleared()])
                await asyncio.sleep(0.02)

    publisher = Publisher(
        Sockets(endpoint=where[0]), lambda *_: msgspec.msgpack.encode([1, [["BlockRemoved", [1]]], 0])
    )
    try:
        async with servers(reply(200), reply(200)) as (one, two):
            urls = {one.url, two.url}
            file.write_text(one.url)
            async with front("--servers", str(file), policy=policy) as f:
                file.write_text(f"{one.url} events={where[0]}\n{two.url}  events={where[1]}\n")
                await f.watch.look()
                await told(lambda: (one.url, 0, KVRemoved([1])) in policy.told)
                file.write_text(two.url)
                await f.watch.look()
                # neither is followed now
                await told(lambda: {url for url, _, change in policy.told[-2:] if change == KVCleared()} == urls)
                assert {url for url, _, change in policy.told if isinstance(change, KVRemoved)} == {one.url}
    finally:
        publisher.close()


async def test_a_changed_list_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    pause = asyncio.Event()
    async with servers(stream(b"data: 1\n\n", b"data: 2\n\n", pause=pause), reply(200)) as made:
        file.write_text(made[0].url)
        async with front("--servers", str(file)) as f:
            asked = f.client.build_request("POST", CHAT, json={})
            answer = await f.client.send(asked, stream=True)
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"data: 1\n\n"
            file.write_text(f"{made[1].url}\n")
            await f.watch.look()
            assert [server.state for server in f.fleet.servers] == ["ready", "draining"]
            for _ in range(3):
                assert (await f.client.get("/v1/models")).status_code == 200
            assert [len(server.seen) for server in made] == [1, 3]
            pause.set()
            assert b"".join([piece async for piece in pieces]) == b"data: 2\n\n"
            await f.watch.look()
            assert [server.url for server in f.fleet.servers] == [made[1].url]


async def test_a_wrong_list_changes_nothing_and_is_told(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    async with servers(reply(200)) as (server,):
        file.write_text(server.url)
        async with front("--servers", str(file)) as f:
            for content in ("nonsense:x", None):
                if content is None:
                    file.unlink()
                else:
                    file.write_text(content)
                await f.watch.look()
                assert (await f.client.get("/v1/models")).status_code == 200
                assert str(file) in (await f.client.get("/fleet")).json()["problem"]
            file.write_text(server.url)
            await f.watch.look()
            assert (await f.client.get("/fleet")).json()["problem"] is None


async def test_a_server_can_be_drained_and_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    async with servers(reply(200), reply(200)) as made:
        first, second = (server.url for server in made)
        file.write_text(f"{first}\n{second} drain\n")
        async with front("--servers", str(file)) as f:
            for _ in range(4):
                await f.client.get("/v1/models")
            assert [len(server.seen) for server in made] == [4, 0]
            states = [server["state"] for server in (await f.client.get("/fleet")).json()["servers"]]
            assert states == ["ready", "drained"]
            file.write_text(f"{first} drain\n{second}\n")
            await f.watch.look()
            for _ in range(4):
                await f.client.get("/v1/models")
            assert [len(server.seen) for server in made] == [4, 4]


async def test_a_server_that_comes_back_gets_requests_again() -> None:
    async with servers(reply(200)) as (server,), front(server.url) as f:
        port = int(server.url.rpartition(":")[2])
        await server.stop()
        assert (await f.client.get("/v1/models")).status_code == 503
        await f.watch.look()
        assert (await f.client.get("/v1/models")).status_code == 503
        await server.start(port)
        await f.watch.look()
        assert (await f.client.get("/v1/models")).status_code == 200


async def test_a_server_that_is_silent_once_is_busy_and_twice_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.routing.health._ANSWER_SECONDS", 0.1)
    async with servers(reply(200)) as (server,), front(server.url) as f:
        silent = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await silent.wait()
            writer.close()

        port = int(server.url.rpartition(":")[2])
        await server.stop()
        other = await asyncio.start_server(handle, "127.0.0.1", port)
        await f.watch.look()
        assert f.fleet.servers[0].problem is None
        await f.watch.look()
        assert f.fleet.servers[0].problem == "it did not answer in time"
        silent.set()
        other.close()


async def test_requests_go_where_the_fewest_are() -> None:
    hold = asyncio.Event()

    def behaviour() -> FakeServer:
        async def wait(seen: object, writer: asyncio.StreamWriter) -> None:
            await hold.wait()
            await reply(200)(seen, writer)  # type: ignore[arg-type]

        return FakeServer(wait)

    async with servers(behaviour().behave, behaviour().behave, behaviour().behave) as made:
        made[2].load = {"server_load": 4}  # from others
        async with front(*(server.url for server in made)) as f:
            waiting = [asyncio.create_task(f.client.post(CHAT, json={})) for _ in range(6)]
            async with asyncio.timeout(60):
                while sum(len(server.seen) for server in made) < 6:
                    await asyncio.sleep(0.01)
            assert [len(server.seen) for server in made] == [3, 3, 0]
            hold.set()
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


@pytest.mark.parametrize(
    ("report", "body", "found"),
    [
        ('JSON {"named_metrics": {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.5}}',
         b"", (3, 0.5)),
        ('JSON {"named_metrics": {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 7}}',
         b"", (3, None)),
        ("", b'{"server_load": 4}', (4, None)),
        ("JSON {}", b'{"server_load": 4}', (4, None)),
        ("TEXT x", b"", None), ("JSON [", b"[", None), ("", b'{"server_load": -1}', None),
        ("", b'{"server_load": NaN}', None), ("", b'{"server_load": "4"}', None), ("", b'{"server_load": 1e300}', None),
        ("", b"[" * 5000, None), ("", b"\xff", None),
    ],
)  # fmt: skip
def test_reports_of_load(report: str, body: bytes, found: object) -> None:
    assert load_of(report, body) == found


def test_a_file_that_is_replaced_is_seen(tmp_path: Path) -> None:
    file, new = tmp_path / "servers.txt", tmp_path / "new"
    file.write_text("a:1")
    watched = ServerFile(str(file))
    assert watched.changed()
    watched.read()
    assert not watched.changed()
    new.write_text("b:1")
    os.utime(new, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    new.replace(file)
    assert watched.changed()


def test_what_ends_while_a_server_reports_is_not_taken_for_others_requests() -> None:
    server = FleetServer(ListedServer("http://a:1"))
    with server.busy(), server.busy():
        own = server.in_flight
    server.reported(3, None, own)
    assert server.num_other == 1
    server.reported(0, 0.5)
    assert (server.num_other, server.kv_usage) == (0, 0.5)
