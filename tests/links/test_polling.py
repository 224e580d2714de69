"""Waiting for sockets, also where this process has so many that their numbers are high."""

from __future__ import annotations

import fcntl
import resource
import socket
import time

import pytest

from frame.links.polling import wait_for


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_what_can_be_read_and_written_is_named(pair):
    ours, theirs = pair
    assert wait_for([ours], [ours]) == ([], [ours])
    theirs.send(b"x")
    assert wait_for([ours], [theirs]) == ([ours], [theirs])
    assert wait_for([ours, theirs]) == ([ours], [])
    theirs.close()
    assert wait_for([ours]) == ([ours], [])


def test_it_waits_no_longer_than_it_is_told(pair):
    start = time.monotonic()
    assert wait_for(pair, seconds=0.02) == ([], [])
    assert time.monotonic() - start >= 0.02
    assert wait_for(pair, seconds=-1) == ([], [])
    pair[1].send(b"x")
    assert wait_for(pair[:1], seconds=float("inf")) == wait_for(pair[:1], seconds=1e300) == ([pair[0]], [])


def test_high_numbers(pair):
    """`select.select` refuses those from 1,024 on."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= most < 3000:
        pytest.skip("this process may have few files open")
    high = socket.socket(fileno=fcntl.fcntl(pair[0].fileno(), fcntl.F_DUPFD_CLOEXEC, 2000))
    assert high.fileno() >= 2000
    pair[1].send(b"x")
    assert wait_for([high], [high], 1) == ([high], [high])
    high.close()


def test_a_closed_one_is_an_error(pair):
    pair[0].close()
    with pytest.raises(ValueError, match="negative"):
        wait_for([pair[0]])
