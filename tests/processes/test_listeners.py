"""The listening sockets of a server: nothing stays open, and no file stays, where one of them cannot be had."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from frame.core.config.errors import ConfigError
from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.processes.launcher import launch
from frame.core.processes.listeners import bind

opened: list[socket.socket] = []


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    opened.clear()

    class Watched(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(socket, "socket", Watched)


def still_open() -> int:
    return sum(one.fileno() >= 0 for one in opened)


def test_a_start_that_finds_the_admin_port_taken_leaves_no_public_socket(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, public = taken.getsockname()[1], tmp_path / "public"
        config = FrameConfig.model_validate({"server": {"uds": str(public), "admin_port": port, "admin_key": ["k"]}})
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another --admin-port$"):
            launch(config)
        assert not public.exists()
        assert still_open() == 1


def test_the_file_of_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "public"))
    bind(config).close()
    with bind(config):
        assert still_open() == 1


def test_a_unix_socket_that_a_server_listens_at_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "public"))
    with bind(config):
        with pytest.raises(ConfigError, match="a server listens there already"):
            bind(config)
        assert still_open() == 1
