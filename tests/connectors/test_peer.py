"""Sockets of the peer connector: who may ask, how much, and what a peer that fails or lies can do."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import encode
from frame.plugins.connectors.blocks.wire import (
    MAX_KEYS,
    VERSION,
    Ask,
    Challenge,
    Held,
    Hello,
    PeerError,
    Welcome,
    admit,
    checksum,
    receive,
    send,
)
from frame.plugins.connectors.peer import server as peer_server
from frame.plugins.connectors.peer.client import PeerClient
from frame.plugins.connectors.peer.options import Address, PeerOptions
from frame.plugins.connectors.peer.server import HostBlocks, PeerServer
from frame.testing import make_setup
from frame.testing.fake_cache import make_layout
from tests.free_ports import free_ports

SECRET = b"a secret that all share"
KEYS = [bytes([index]) * 32 for index in range(5)]
SIZE = 24
SECONDS = 60.0  # enough for what threads do on a busy machine


@pytest.fixture
def blocks():
    made = HostBlocks(10_000)
    made.space = "model/0"
    for index, key in enumerate(KEYS[:3]):
        made.put(key, np.full(SIZE, index, np.uint8))
    return made


@pytest.fixture(params=["unix", "tcp"])
def address(request, tmp_path):
    if request.param == "unix":
        return Address(path=str(tmp_path / "peer"))
    return Address(host="127.0.0.1", port=free_ports())


@pytest.fixture
def server(address, blocks):
    made = PeerServer(address, blocks, secret=SECRET, timeout=SECONDS)
    yield made
    made.close()


@pytest.fixture
def client():
    made = []

    def make(address, secret=SECRET, space="model/0", timeout=SECONDS, retry=0.0):
        made.append(PeerClient(address, secret=secret, space=space, timeout=timeout, retry=retry))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_held_blocks_are_named_and_fetched(server, address, client):
    caller = client(address)
    assert caller.held(KEYS) == b"\1\1\1\0\0"
    assert caller.held([KEYS[4]] * (MAX_KEYS + 3)) == bytes(MAX_KEYS + 3)
    out = np.zeros((3, SIZE), np.uint8)
    assert caller.fetch([KEYS[2], KEYS[4], KEYS[1]], out) == [0, 2]
    assert out[0].tolist() == [2] * SIZE
    assert out[2].tolist() == [1] * SIZE


def test_other_models_find_nothing(server, address, client):
    caller = client(address, space="other/0")
    assert caller.held(KEYS) == bytes(5)


@pytest.mark.parametrize("secret", [b"", b"another secret, as long"])
def test_strangers_learn_nothing(server, address, secret, client):
    caller = client(address, secret=secret)
    with pytest.raises(PeerError):
        caller.held(KEYS)


def connect(address):
    return PeerClient(address, secret=b"", space="", timeout=SECONDS, retry=0)._connect()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"abc",
        struct.pack("<I", 5000) + bytes(5000),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["long", "garbage", "much", "http"],
)
def test_garbage_is_hung_up_on(server, address, sent, client):
    with connect(address) as stranger:
        assert receive(stranger, Challenge, SECONDS).nonce
        stranger.sendall(sent)
        with pytest.raises(PeerError):
            receive(stranger, Welcome, SECONDS)
    assert client(address).held(KEYS[:1]) == b"\1"


def test_silence_does_not_hold_a_place_for_long(server, address, monkeypatch):
    monkeypatch.setattr(peer_server, "_HELLO_SECONDS", 0.2)
    with connect(address) as stranger:
        receive(stranger, Challenge, SECONDS)
        with suppress(OSError):  # on a busy machine it has hung up already
            for _ in range(3):
                stranger.sendall(b"\1")
                time.sleep(0.05)
        with pytest.raises(PeerError):
            receive(stranger, Welcome, SECONDS)


def test_too_many_questions_at_once_are_refused(server, address, client):
    for keys, fetch in ((KEYS[:1] * (peer_server.MAX_FETCH + 1), True), ([b""] * (MAX_KEYS + 1), False)):
        caller = client(address)
        with pytest.raises(PeerError):
            caller._ask(keys, fetch=fetch)


def test_too_many_callers_are_hung_up_on(blocks, address, monkeypatch, client):
    monkeypatch.setattr(peer_server, "MAX_CALLERS", 1)
    server = PeerServer(address, blocks, secret=SECRET, timeout=SECONDS)
    first = client(address)
    assert first.held(KEYS[:1]) == b"\1"
    with pytest.raises(PeerError):
        client(address).held(KEYS[:1])
    server.close()
    server.close()


def test_the_oldest_copies_go_first():
    blocks = HostBlocks(3 * SIZE)
    for key in KEYS[:3]:
        assert blocks.put(key, np.zeros(SIZE, np.uint8))
    assert blocks.touch(KEYS[0])
    blocks.put(KEYS[3], np.zeros(SIZE, np.uint8))
    assert [blocks.get(key) is not None for key in KEYS] == [True, False, True, True, False]
    assert not blocks.put(KEYS[4], np.zeros(4 * SIZE, np.uint8))
    blocks.clear()
    assert len(blocks) == 0


def test_an_abandoned_socket_is_taken_over_and_a_living_one_is_not(tmp_path, blocks, client):
    address = Address(path=str(tmp_path / "peer"))
    left = socket.socket(socket.AF_UNIX)
    left.bind(address.path)
    left.close()
    server = PeerServer(address, blocks, secret=b"", timeout=SECONDS)
    with pytest.raises(ValueError, match="cannot listen on unix:"):
        PeerServer(address, blocks, secret=b"", timeout=SECONDS)
    assert client(address, secret=b"").held(KEYS[:1]) == b"\1"
    server.close()


class Liar:
    """Knows the secret and answers `answers`, frame by frame; None hangs up, "" says nothing."""

    def __init__(self, path, answers):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.answers = answers
        self.asked = 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with self.listener, suppress(PeerError, OSError):
            caller, _ = self.listener.accept()
            with caller:
                admit(caller, SECRET, SECONDS)
                for answer in self.answers:
                    receive(caller, Ask, SECONDS)
                    self.asked += 1
                    if answer is None:
                        return
                    caller.sendall(answer)
                caller.settimeout(SECONDS)
                caller.recv(1)  # until the other side has had enough


def frame(message):
    data = encode(message)
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        frame(Held(b"\1")),
        frame(Held(b"\1" * 3)),
        frame(Held(b"\1\1\1", [checksum(key, bytes(SIZE)) for key in KEYS[:3]])) + bytes(SIZE + 3),
        frame(Held(b"\1\1\1", [checksum(KEYS[0], bytes(SIZE))])) + bytes(3 * SIZE),
        frame(Welcome(b"")),
        struct.pack("<I", 1 << 30),
    ],
    ids=["hangs up", "silent", "short", "no bytes", "few bytes", "few sums", "other kind", "long"],
)
def test_a_peer_that_fails_in_the_middle_costs_a_pause(tmp_path, answer, client):
    liar = Liar(str(tmp_path / "liar"), [answer])
    caller = client(Address(path=str(tmp_path / "liar")), timeout=2.0, retry=60)
    with pytest.raises(PeerError):
        caller.fetch(KEYS[:3], np.zeros((3, SIZE), np.uint8))
    assert liar.asked == 1
    assert caller.resting
    with pytest.raises(PeerError, match="a moment ago"):
        caller.held(KEYS)
    caller.close()
    liar.thread.join()


@pytest.mark.parametrize("proof", [b"", bytes(32), None], ids=["none", "wrong", "the caller's own"])
def test_a_listener_that_does_not_know_the_secret_gives_no_blocks(tmp_path, proof, client):
    """It has the address of a peer that has ended, and would have wrong tokens made of blocks that it invents."""
    sums = frame(Held(b"\1", [checksum(KEYS[0], bytes(SIZE))])) + bytes(SIZE)

    def impostor():
        caller, _ = listener.accept()
        with caller, suppress(PeerError, OSError):
            send(caller, Challenge(VERSION, bytes(32)))
            hello = receive(caller, Hello, SECONDS)
            send(caller, Welcome(hello.proof if proof is None else proof))
            receive(caller, Ask, SECONDS)
            caller.sendall(sums)

    path = str(tmp_path / "impostor")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=impostor)
        thread.start()
        caller = client(Address(path=path))
        with pytest.raises(PeerError, match="does not know the secret"):
            caller.fetch(KEYS[:1], np.zeros((1, SIZE), np.uint8))
        caller.close()
        thread.join()


def test_nobody_there(tmp_path, client):
    caller = client(Address(path=str(tmp_path / "nobody")), retry=60)
    with pytest.raises(PeerError, match="cannot be reached"):
        caller.held(KEYS)
    assert caller.resting


@pytest.mark.parametrize("text", ["", "unix:relative", "tcp:host", "tcp::80", "tcp:host:0", "tcp:host:70000", "/path"])
def test_wrong_addresses_show_the_right_form(text):
    with pytest.raises(ValueError, match="write unix:/path or tcp:host:port"):
        Address.parse(text)


def test_a_port_that_leaves_none_to_a_further_worker_is_named():
    with pytest.raises(ValueError, match=r"'tcp:host:65530' leaves no port to the worker that is 6 behind its own"):
        Address.parse("tcp:host:65530", 6)


def test_addresses_by_rank():
    assert str(Address.parse("tcp:[::1]:9000", 2)) == "tcp:::1:9002"
    assert str(Address.parse("unix:/run/peer", 1)) == "unix:/run/peer.1"


def test_tcp_demands_a_secret(tmp_path):
    config = from_flat({"kv_connector": "peer", "plugin": {"peer": {"peers": ["tcp:localhost:9000"]}}})
    with pytest.raises(PluginError, match="secret_file must be given"):
        Registry.load().make("connector", "peer", make_setup("connector", layout=make_layout()), config)
    short = tmp_path / "secret"
    short.write_text("short\n")
    for path, message in ((short, "at least 16 characters"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ValueError, match=message):
            PeerOptions(peers=["tcp:localhost:9000"], secret_file=str(path)).secret()
    short.write_text("long enough for everybody\n")
    assert PeerOptions(secret_file=str(short)).secret() == b"long enough for everybody"


def test_frames_are_not_executable():
    assert msgspec.msgpack.decode(encode(Ask(KEYS[:1]))) == {"keys": KEYS[:1], "fetch": False}


@pytest.mark.parametrize("place", [0, SIZE, 2 * SIZE - 1])
def test_a_block_that_changes_on_its_way_is_not_taken(server, address, client, monkeypatch, place):
    def changes(connection, message, payload=b""):
        changed = bytearray(payload)
        if payload:
            changed[place] ^= 1
        send(connection, message, changed)

    monkeypatch.setattr(peer_server, "send", changes)
    with pytest.raises(PeerError, match="a block was changed on its way"):
        client(address).fetch(KEYS[:2], np.zeros((2, SIZE), np.uint8))


def test_an_answer_that_comes_twice_is_not_taken_for_the_next(server, address, client, monkeypatch):
    def repeats(connection, message, payload=b""):
        send(connection, message, payload)
        if payload:
            send(connection, message, payload)

    monkeypatch.setattr(peer_server, "send", repeats)
    caller, out = client(address), np.zeros((1, SIZE), np.uint8)
    assert caller.fetch(KEYS[:1], out) == [0]
    with pytest.raises(PeerError, match="a block was changed on its way"):
        caller.fetch(KEYS[1:2], out)
    assert caller.fetch(KEYS[1:2], out) == [0]
    assert out.tolist() == [[1] * SIZE]
