"""The keeper: what it holds and gives, to whom, and that nothing stays open."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from frame.kept_weights import exchange, keeper as keeping
from frame.kept_weights.exchange import ask
from frame.kept_weights.keeper import WeightKeeper
from frame.kept_weights.messages import MAX_PIECES, Ask, Drop, Keep, Renew, Suspend
from tests.server.running import until


@pytest.fixture
def keeper():
    made = WeightKeeper()
    yield made
    made.close()


def open_files():
    """Those of this process, and so of the keeper, which closes a connection a moment after its peer."""
    return len(list(Path("/proc/self/fd").iterdir()))


def files_of(count):
    made = [os.memfd_create("weights") for _ in range(count)]
    for number, file in enumerate(made):
        os.write(file, bytes([number % 256]))
    return made


def closed(files):
    for file in files:
        os.close(file)


def keep(keeper, rank=0, key="a", count=3):
    files = files_of(count)
    ask(keeper.address, Keep(rank, key, b"table", [1] * count), files)
    closed(files)


def test_many_files_come_back_in_their_order(keeper):
    before = open_files()
    keep(keeper, count=300)
    until(lambda: (open_files() - before, keeper.num_bytes) == (300, 300))
    for _ in range(2):
        answer, files = ask(keeper.address, Ask(0, "a"))
        assert (answer.table, len(answer.sizes)) == (b"table", 300)
        assert [os.pread(file, 1, 0)[0] for file in files] == [number % 256 for number in range(300)]
        closed(files)
    assert ask(keeper.address, Ask(1, "a")) == (exchange.Kept(), [])
    keeper.close()
    until(lambda: open_files() < before)  # its socket is closed, too
    with pytest.raises(ConnectionError):
        ask(keeper.address, Ask(0, "a"))


def test_another_key_gives_the_memory_back(keeper):
    before = open_files()
    keep(keeper)
    keep(keeper, rank=1, count=2)
    assert ask(keeper.address, Ask(0, "b")) == (exchange.Kept(other=True), [])
    assert ask(keeper.address, Ask(0, "b")) == (exchange.Kept(), [])
    until(lambda: (open_files() - before, keeper.num_bytes) == (2, 2))
    ask(keeper.address, Drop(1))
    until(lambda: (open_files(), keeper.num_bytes) == (before, 0))
    keep(keeper)
    keep(keeper, count=1)  # in place of the first
    until(lambda: (open_files() - before, keeper.num_bytes) == (1, 1))
    keeper.clear()
    until(lambda: (open_files(), keeper.num_bytes) == (before, 0))


def test_nobody_finds_what_is_suspended(keeper):
    keep(keeper)
    ask(keeper.address, Suspend(0))
    assert keeper.num_bytes == 3
    ask(keeper.address, Renew(0, "b", b"other"))
    answer, files = ask(keeper.address, Ask(0, "b"))
    assert (answer.table, len(files)) == (b"other", 3)
    closed(files)
    ask(keeper.address, Suspend(0))
    assert ask(keeper.address, Ask(0, "b")) == (exchange.Kept(other=True), [])
    assert keeper.num_bytes == 0
    for message in (Suspend(0), Renew(0, "b", b"")):
        with pytest.raises(ConnectionError):
            ask(keeper.address, message)


@pytest.mark.parametrize(
    "sent", [b"", b"\0\0\0\4oops", b"\xff\xff\xff\xff", b"\0\0"], ids=["nothing", "another", "too much", "a part"]
)
def test_who_says_something_else_is_cut_off(sent, keeper):
    keep(keeper)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{keeper.address[1:]}")
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    answer, files = ask(keeper.address, Ask(0, "a"))
    assert len(answer.sizes) == len(files) == 3
    closed(files)


def test_files_that_do_not_come_are_no_weights(keeper, monkeypatch):
    before = open_files()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{keeper.address[1:]}")
        channel = exchange.Channel(connection, exchange.Kept)
        channel.send(Keep(0, "a", b"", [1, 1, 1]))
        files = files_of(2)
        channel.send_descriptors(files)
        closed(files)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    with pytest.raises((ConnectionError, BrokenPipeError)):
        ask(keeper.address, Keep(0, "a", b"", [1] * (MAX_PIECES + 1)), [])
    until(lambda: (open_files(), keeper.num_bytes) == (before, 0))


def test_programs_that_are_started_do_not_get_the_files(keeper):
    keep(keeper)
    _, files = ask(keeper.address, Ask(0, "a"))
    assert not any(os.get_inheritable(file) for file in (*files, *keeper._held[0].files))
    closed(files)


def begun(keeper):
    """A connection of somebody whom the keeper listens to, when it has kept three files."""
    before = open_files()
    keep(keeper)
    until(lambda: open_files() == before + 3)  # it has hung up
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"\0{keeper.address[1:]}")
    until(lambda: open_files() == before + 5)
    return connection


def test_it_listens_again_after_too_many_files_were_open(keeper, monkeypatch, caplog):
    monkeypatch.setattr(keeping, "_AGAIN_SECONDS", 0.05)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with begun(keeper) as connection:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            connection.shutdown(socket.SHUT_WR)
            until(lambda: "it tries again" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    _, files = ask(keeper.address, Ask(0, "a"))
    assert len(files) == 3
    closed(files)


def test_who_finds_many_waiting_waits(keeper, monkeypatch):
    with begun(keeper) as first, ExitStack() as waiting:
        for _ in range(17):
            other = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            other.connect(f"\0{keeper.address[1:]}")
        monkeypatch.setattr(exchange.time, "sleep", lambda seconds: (waiting.close(), first.close()))
        _, files = ask(keeper.address, Ask(0, "a"))
    assert len(files) == 3
    closed(files)
