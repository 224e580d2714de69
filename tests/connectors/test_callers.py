"""Callers of a socket: one that cannot be accepted ends nothing, and closing ends everything."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress

from frame.links.lost import LOST_SECONDS
from frame.plugins.connectors.blocks.callers import Callers


def echo(caller):
    with suppress(OSError):  # it was hung up on
        while data := caller.recv(16):
            caller.sendall(data)


def said(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        caller.sendall(b"a")
        return caller.recv(16)


def test_a_caller_that_cannot_be_accepted_ends_nothing():
    faults = [errno.ECONNABORTED, errno.EMFILE]

    class Listener(socket.socket):
        def accept(self):
            if faults:
                raise OSError(faults.pop(), "no caller")
            return super().accept()

    listener = Listener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    callers = Callers(listener, echo, most=4, name="test")
    assert said(port) == b"a"
    assert callers.close()


def test_a_caller_for_whom_no_thread_can_be_started_ends_nothing(monkeypatch):
    """A flood of callers takes threads that others need: the listener's own ended, and nobody was answered any more."""
    faults, start = [RuntimeError("can't start new thread")], threading.Thread.start

    def starts(thread):
        if thread.name == "test-caller" and faults:
            raise faults.pop()
        start(thread)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    callers = Callers(listener, echo, most=1, name="test")
    monkeypatch.setattr(threading.Thread, "start", starts)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        assert caller.recv(16) == b""
    assert said(port) == b"a"
    assert callers.close()


def test_closing_ends_the_listener_and_all_callers_once():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    callers = Callers(listener, echo, most=4, name="test")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        caller.sendall(b"a")
        assert caller.recv(16) == b"a"
        assert callers.close()
        assert not callers.close()
        assert caller.recv(16) == b""
    assert listener.fileno() == -1


def test_a_caller_whose_machine_vanishes_is_given_up():
    options = []

    def answer(caller):
        options.append(caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        echo(caller)

    listener = socket.create_server(("127.0.0.1", 0))
    callers = Callers(listener, answer, most=4, name="test")
    assert said(listener.getsockname()[1]) == b"a"
    assert options == [1000 * LOST_SECONDS]
    callers.close()


def test_an_answer_that_is_under_way_when_all_ends_raises_nothing(monkeypatch):
    """Its connection was hung up on; the thread that answers closes it, and says so in the log alone."""
    begun, ended, raised, threads = threading.Event(), threading.Event(), [], []
    monkeypatch.setattr(threading, "excepthook", lambda found: raised.append(found.exc_value))

    def answer(caller):
        threads.append(threading.current_thread())
        begun.set()
        assert ended.wait(60)
        caller.settimeout(30)
        caller.sendall(b"a")

    listener = socket.create_server(("127.0.0.1", 0))
    callers = Callers(listener, answer, most=4, name="test")
    with socket.create_connection(listener.getsockname(), timeout=30):
        assert begun.wait(60)
        callers.close()
        ended.set()
        threads[0].join()
    assert raised == []
