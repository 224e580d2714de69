"""Connections that are made while their owner closes: none stays open."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from frame.plugins.connectors.blocks.wire import PeerError
from frame.plugins.connectors.nixl import links as nixl_links
from frame.plugins.connectors.nixl.links import Links, Source
from frame.plugins.connectors.nixl.wire import Channel, Renew, Renewed
from frame.plugins.connectors.peer import client as peer_client
from frame.plugins.connectors.peer.client import PeerClient
from frame.plugins.connectors.peer.options import Address
from frame.plugins.connectors.push import lane as push_lane
from frame.plugins.connectors.push.carrier import Stream
from frame.plugins.connectors.push.facts import Facts
from frame.plugins.connectors.push.lanes import Lanes
from frame.plugins.connectors.push.messages import Goal
from frame.plugins.connectors.push.parcels import Parcel
from frame.plugins.connectors.push.wire import Ready


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def goes_on(*arguments):
    raise AssertionError("it speaks on a connection that nobody would close")


def test_a_link_that_is_closed_while_it_connects(listener, monkeypatch):
    links = Links(b"a secret of the tests", None, timeout=5, retry=0)
    link, made, connect = links.to(Source("e", "r", *listener.getsockname())), [], socket.create_connection

    def connects(*arguments, **named):
        made.append(connect(*arguments, **named))
        links.close()
        return made[0]

    monkeypatch.setattr(nixl_links.socket, "create_connection", connects)
    monkeypatch.setattr(nixl_links, "call", goes_on)
    with pytest.raises(PeerError):
        link.ask(Renew(b""), Renewed)
    assert [one.fileno() for one in made] == [-1]


def test_a_caller_that_is_closed_while_it_connects(listener, monkeypatch):
    host, port = listener.getsockname()
    client = PeerClient(Address(host=host, port=port), secret=b"", space="", timeout=5, retry=0)
    made, connect = [], client._connect

    def connects():
        made.append(connect())
        client.close()
        return made[0]

    monkeypatch.setattr(client, "_connect", connects)
    monkeypatch.setattr(peer_client, "introduce", goes_on)
    with pytest.raises(PeerError):
        client.held([b"key"])
    assert [one.fileno() for one in made] == [-1]


def test_a_channel_whose_connection_another_thread_has_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        channel = Channel(one, b"key", calls=True)
        one.close()
        with pytest.raises(PeerError, match="the connection failed"):
            channel.send(Renew(b""), 5)


class Willing:
    """The channel to an engine that takes everything."""

    def send(self, message, seconds):
        pass

    def receive(self, kind, seconds):
        return Ready()


@pytest.fixture
def lanes(monkeypatch):
    """Lanes, whose connections `ends` has; what their threads raise fails."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda found: raised.append(found.exc_value))
    made = Lanes(Stream(), b"", Facts(1, "model", 4, "", 1, 1, ""), 0, timeout=5, retry=0)
    made.ends = []

    def connect(place, secret, meet, seconds):
        made.ends.extend(socket.socketpair())
        return made.ends[-1], Willing()

    monkeypatch.setattr(push_lane, "connect", connect)
    yield made
    made.close()
    for end in made.ends:
        end.close()
    assert raised == []


class Gate:
    """Work of a lane's thread that takes until the lane is being closed."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.may_end.wait(60)

    def close(self, lanes):
        """Closes the lanes, of which one is at this work."""
        assert self.begun.wait(60)
        (lane,) = lanes._lanes.values()
        closing = threading.Thread(target=lanes.close)
        closing.start()
        while not lane._closed:
            time.sleep(0.001)
        for end in lanes.ends[:1]:
            assert end.recv(1) == b"", "its connection has heard of it, too"
        self.may_end.set()
        closing.join()


def parcel():
    return Parcel("r", Goal("127.0.0.1", 1, bytes(32), 4))


def test_a_lane_that_is_closed_while_it_is_to_tell_of_an_end(lanes):
    """Whoever waits hears that the blocks are not there."""
    one, gate = parcel(), Gate()
    lanes.begin(one)
    (lane,) = lanes._lanes.values()
    lane._give(gate)
    lanes.end(one)
    gate.close(lanes)
    assert lanes.take().unsent == ["r"]


def test_a_lane_that_is_closed_while_it_connects(lanes, monkeypatch):
    gate, connect = Gate(), push_lane.connect
    monkeypatch.setattr(push_lane, "connect", lambda *given: gate() or connect(*given))
    monkeypatch.setattr(Willing, "send", goes_on)
    lanes.begin(parcel())
    gate.close(lanes)
    assert lanes.take().unsent == ["r"]
