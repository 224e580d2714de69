"""Connections that are made while their owner closes: none stays open."""

from __future__ import annotations

import socket

import pytest

from frame.plugins.connectors.blocks.wire import PeerError
from frame.plugins.connectors.nixl import links as nixl_links
from frame.plugins.connectors.nixl.links import Links, Source
from frame.plugins.connectors.nixl.wire import Renew, Renewed
from frame.plugins.connectors.peer import client as peer_client
from frame.plugins.connectors.peer.client import PeerClient
from frame.plugins.connectors.peer.options import Address


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
