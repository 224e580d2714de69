"""What senders of blocks may not do: none without the secret, of another model, or with frames that say nonsense."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from contextlib import suppress

import pytest
import torch
from msgspec import structs

from frame.interfaces import Mesh
from frame.plugins.connectors.blocks.host_arena import HostArena
from frame.plugins.connectors.blocks.wire import Challenge, PeerError, receive, send, send_bytes
from frame.plugins.connectors.nixl import wire as nixl_wire
from frame.plugins.connectors.push import worker as push_worker
from frame.plugins.connectors.push.carrier import Stream
from frame.plugins.connectors.push.door import Door
from frame.plugins.connectors.push.facts import Facts
from frame.plugins.connectors.push.inbox import Inbox
from frame.plugins.connectors.push.lanes import Lanes
from frame.plugins.connectors.push.messages import Goal
from frame.plugins.connectors.push.parcels import Parcel
from frame.plugins.connectors.push.prompts import Row
from frame.plugins.connectors.push.wire import Begin, Drop, End, Have, Meet, No, Part, Ready, connect
from frame.testing.fake_cache import make_layout
from tests.connectors.push_pairs import SECONDS, SECRET, Pairs, inbox, port

LAYOUT = make_layout()  # one group of two layers, blocks of 4 tokens
FACTS = Facts.of(LAYOUT, Mesh(), "format")
BYTES = 256
DIGEST = b"d" * 32


class Ports:
    """What an engine of one rank opens, without the engine."""

    def __init__(self, expiry=5.0, num_bytes=1 << 16):
        arena = HostArena(num_bytes, lambda count: torch.zeros(count, dtype=torch.uint8))
        self.inbox = Inbox(
            LAYOUT,
            [Row(0, BYTES)] * 2,
            arena,
            "127.0.0.1",
            secret=SECRET.encode(),
            facts=FACTS,
            rank=0,
            expiry=expiry,
        )
        self.door = Door("127.0.0.1", 0, secret=SECRET.encode(), facts=[FACTS], ports=[self.inbox.port])

    def connect(self, secret=SECRET, facts=FACTS, rank=0):
        return connect(("127.0.0.1", self.door.port), secret.encode(), Meet(facts, rank), SECONDS)

    def states(self, until=None):
        """What became of prompts, once it is `until`."""
        latest = time.monotonic() + SECONDS
        found = self.inbox.take().events
        while until is not None and found.get(DIGEST) != until:
            assert time.monotonic() < latest, found
            found |= self.inbox.take().events
            time.sleep(0.001)
        return found

    def close(self):
        self.door.close()
        self.inbox.close()


@pytest.fixture
def ports():
    made = Ports()
    yield made
    made.close()


def sent(connection, channel, *messages):
    for message in messages:
        channel.send(message, SECONDS)
        if isinstance(message, Part):
            send_bytes(connection, memoryview(bytes([message.layer + 1]) * (message.count * BYTES)), SECONDS)


def begun(channel, num_tokens=8, digest=DIGEST):
    channel.send(Begin(digest, num_tokens), SECONDS)
    return channel.receive(Ready | Have | No, SECONDS)


def test_a_whole_prompt_arrives_and_is_given_once(ports):
    connection, channel = ports.connect()
    assert isinstance(begun(channel), Ready)
    sent(connection, channel, Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 1, 1), Part(DIGEST, 1, 0, 1), End(DIGEST))
    ports.states("arrived")
    prompt = ports.inbox.claim(DIGEST)
    assert [part.unique().tolist() for part in prompt.parts] == [[1], [2]]
    assert ports.inbox.claim(DIGEST) is None
    assert ports.inbox.arena.used_bytes == 4 * BYTES
    ports.inbox.release(prompt)
    assert ports.inbox.arena.used_bytes == 0
    connection.close()


@pytest.mark.parametrize(
    "messages",
    [
        [End(DIGEST)],
        [Part(DIGEST, 0, 0, 2), End(DIGEST)],
        [Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 1, 1), End(DIGEST)],
        [Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 0, 2), Drop(DIGEST)],
    ],
)
def test_what_is_not_whole_is_dropped(ports, messages):
    connection, channel = ports.connect()
    begun(channel)
    sent(connection, channel, *messages)
    ports.states("gone")
    assert ports.inbox.claim(DIGEST) is None
    assert ports.inbox.arena.used_bytes == 0
    connection.close()


def test_blocks_that_were_changed_on_their_way_are_dropped(ports):
    connection, channel = ports.connect()
    begun(channel)
    right = [zlib.crc32(bytes([layer]) * 2 * BYTES) for layer in (1, 2)]
    sent(connection, channel, Part(DIGEST, 0, 0, 2, right[0]), Part(DIGEST, 1, 0, 2, right[1] ^ 1), End(DIGEST))
    ports.states("gone")
    assert isinstance(begun(channel), Ready)
    sent(connection, channel, *(Part(DIGEST, layer, 0, 2, right[layer]) for layer in (0, 1)), End(DIGEST))
    ports.states("arrived")
    connection.close()


@pytest.mark.parametrize("part", [Part(DIGEST, 2, 0, 1), Part(DIGEST, 0, 2, 1), Part(DIGEST, 0, 1, 2)])
def test_blocks_that_are_none_of_the_prompt_end_the_connection(ports, part):
    connection, channel = ports.connect()
    begun(channel)
    sent(connection, channel, part)
    with pytest.raises(PeerError):
        channel.receive(Ready, SECONDS)
    ports.states("gone")
    connection.close()


def test_blocks_of_a_prompt_that_was_not_begun_are_passed_over(ports):
    connection, channel = ports.connect()
    sent(connection, channel, Part(b"e" * 32, 0, 0, 100_000), End(b"e" * 32))
    assert isinstance(begun(channel), Ready)
    connection.close()


def test_a_connection_that_ends_takes_its_prompts_along(ports):
    connection, channel = ports.connect()
    begun(channel)
    sent(connection, channel, Part(DIGEST, 0, 0, 2))
    connection.close()
    ports.states("gone")
    assert ports.inbox.arena.used_bytes == 0


def test_two_senders_of_one_prompt_do_not_mix(ports):
    first, second = ports.connect(), ports.connect()
    assert isinstance(begun(first[1]), Ready)
    assert isinstance(begun(second[1]), Have)
    sent(*second, Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 0, 2), End(DIGEST))
    assert isinstance(begun(second[1], digest=b"e" * 32), Ready)
    assert ports.inbox.claim(DIGEST) is None
    sent(*first, Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 0, 2), End(DIGEST))
    ports.states("arrived")
    assert isinstance(begun(second[1]), Have)
    for connection, _ in (first, second):
        connection.close()


def test_a_second_attempt_begins_anew(ports):
    connection, channel = ports.connect()
    begun(channel)
    sent(connection, channel, Part(DIGEST, 0, 0, 2))
    assert isinstance(begun(channel), Ready)
    sent(connection, channel, Part(DIGEST, 1, 0, 2), End(DIGEST))
    ports.states("gone")
    connection.close()


@pytest.mark.parametrize("num_tokens", [1 << 12, 1 << 26])
def test_what_does_not_fit_is_refused(ports, num_tokens):
    connection, channel = ports.connect()
    assert isinstance(begun(channel, num_tokens), No)
    assert ports.inbox.arena.used_bytes == 0
    connection.close()


def test_a_sender_that_stops_loses_its_memory():
    ports = Ports(expiry=0.2)
    connection, channel = ports.connect()
    begun(channel)
    sent(connection, channel, Part(DIGEST, 0, 0, 2))
    ports.states("gone")
    assert ports.inbox.arena.used_bytes == 0
    connection.close()
    ports.close()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": "other"}, r"the model \(a hash of config.json, weights and dtype\)"),
        ({"grain": 8}, rf"the block size \(8 at the calling engine, {FACTS.grain} at the called one\)"),
        ({"groups": "other"}, "what layers keep"),
        ({"tensor": 2}, "tensor_parallel_size"),
        ({"pipeline": 2}, "pipeline_parallel_size"),
        ({"formats": "other"}, "the format of blocks"),
        ({"version": 9}, "the version of the protocol"),
    ],
)
def test_engines_that_differ_are_told_in_what(ports, changes, what):
    with pytest.raises(PeerError, match=f"the engines differ in {what}"):
        ports.connect(facts=structs.replace(FACTS, **changes))


def test_a_rank_that_is_not_there_is_refused(ports):
    with pytest.raises(PeerError, match="there is no rank 1 here"):
        ports.connect(rank=1)


def test_a_wrong_secret_is_refused_before_anything_is_decoded(ports, monkeypatch):
    read = []
    monkeypatch.setattr(nixl_wire.Channel, "receive", lambda *arguments: read.append(arguments))
    for number in (ports.door.port, ports.inbox.port):
        with pytest.raises(PeerError, match="did not accept the secret"):
            connect(("127.0.0.1", number), b"another secret of 16", Meet(FACTS, 0), SECONDS)
        with socket.create_connection(("127.0.0.1", number), timeout=SECONDS) as raw:
            receive(raw, Challenge, SECONDS)
            send(raw, nixl_wire.Hello(b"n" * 32, b"p" * 32))
            send(raw, Meet(FACTS, 0))
            with pytest.raises(PeerError):
                receive(raw, nixl_wire.Proof, SECONDS)
    assert read == []


def test_noise_and_frames_without_end_take_nothing(ports):
    for number in (ports.door.port, ports.inbox.port):
        for noise in (b"GET / HTTP/1.1\r\n\r\n" * 100, b"\xff" * 64, (1 << 31).to_bytes(4, "little")):
            with socket.create_connection(("127.0.0.1", number), timeout=SECONDS) as raw:
                raw.sendall(noise)
                with suppress(ConnectionResetError):
                    while raw.recv(4096):
                        pass
    connection, channel = ports.connect()
    assert isinstance(begun(channel), Ready)
    connection.close()


def test_a_sender_with_another_secret_or_model_costs_the_computation(tmp_path, caplog):
    pairs = Pairs(tmp_path)
    try:
        here = pairs.engine(options={"wait_seconds": 0.3})
        (tmp_path / "other").write_text("another secret of the tests")
        stranger = pairs.engine(options={"secret_file": str(tmp_path / "other")})
        other = pairs.engine(make_layout(model="other"))
        for number, there in enumerate((stranger, other)):
            prompt = pairs.prompt(40, seed=number)
            pairs.prefill(there, here, f"p{number}", prompt)
            pairs.rest(there)
            assert pairs.decode(here, f"d{number}", prompt) == 0
            assert pairs.unsent(there) == 1
            assert inbox(here).arena.used_bytes == 0
        assert f"no KV blocks go to the engine at 127.0.0.1:{port(here)}: it did not accept the secret" in caplog.text
        assert f"127.0.0.1:{port(here)}: the engines differ in the model" in caplog.text
        pairs.rest(here)
    finally:
        pairs.close()


def test_who_never_answers_is_given_up(tmp_path):
    """The transfer is lost when the deadline has passed; steps and the blocks of requests wait for nobody."""
    pairs = Pairs(tmp_path)
    silent = socket.create_server(("127.0.0.1", 0))
    try:
        there = pairs.engine(options={"timeout_seconds": 0.3})
        asks = {"do_remote_decode": True, "remote_host": "127.0.0.1", "remote_port": silent.getsockname()[1]}
        pairs.add(there, "p", pairs.prompt(40), asks, 1)
        pairs.finish(there, "p")
        pairs.rest(there)
        assert pairs.unsent(there) == 1
        assert all(thread.name != "push-caller" for thread in threading.enumerate())
    finally:
        silent.close()
        pairs.close()


def test_who_waits_hears_of_a_prompt_that_was_dropped_before_its_lane_began(ports):
    lanes = Lanes(Stream(), SECRET.encode(), FACTS, 0, timeout=SECONDS, retry=0.0)
    parcel = Parcel("owner", Goal("127.0.0.1", ports.door.port, DIGEST, 8))
    held = threading.Event()
    place = parcel.goal.host, parcel.goal.port
    assert lanes._open(place)
    lanes._lanes[place]._give(held.wait)  # its thread is slower than the next two calls
    lanes.begin(parcel)
    lanes.drop(parcel)
    held.set()
    ports.states("gone")
    assert ports.inbox.arena.used_bytes == 0
    lanes.close()


def test_memory_for_sending_that_holds_no_block_is_refused(tmp_path, monkeypatch):
    pairs = Pairs(tmp_path)
    arena = push_worker.HostArena
    monkeypatch.setattr(push_worker, "HostArena", lambda num_bytes, pinned: arena(256, pinned))
    try:
        with pytest.raises(ValueError, match="send_buffer_bytes of the push connector must hold the largest block of"):
            pairs.engine(make_layout(block_size=64))
    finally:
        pairs.close()
