"""Workers that another machine's frame starts: the engine's proxy, and the process on the other machine.

Both ends are given a connection; who may connect is the executor's business.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from frame.links.early_workers import WorkerChild

from ..interfaces.executor import DeadWorkerError, Progress
from ..processes.channel import Channel
from .channel_worker import ChannelWorker, FromWorker, WorkerError
from .heartbeat import HeartbeatMemory


class ConnectedWorker(ChannelWorker):
    """A worker in a process that another machine's frame started, and gave this connection."""

    def __init__(self, connection: socket.socket, where: str, progress: Callable[[str], None]) -> None:
        super().__init__(Channel(connection, FromWorker), progress)
        self._where = where
        self._gone = False

    def check(self) -> None:
        if self._gone:
            self.lost()
        self.read_arrived()

    def begin_close(self, *, kills: bool = False) -> None:
        del kills  # its process ends when the connection does
        self.channel.close()

    def close(self) -> None:
        self.begin_close()

    def silent_seconds(self) -> float:
        return 0.0

    def progress(self) -> Progress | None:
        return None

    def take_value(self) -> Any:
        try:
            return super().take_value()
        except WorkerError as error:
            raise WorkerError(f"on {self._where}: {error}", error.culprit) from None

    def lost(self) -> NoReturn:
        self._gone = True
        raise DeadWorkerError(f"its process on {self._where} has ended, or cannot be reached any more")


class WorkerProcess:
    """The process of a worker, on its own machine: made by a recipe, it serves `connection`, and ends with it.

    `model` is the checkpoint on this machine, where it is not at the path that the recipe names.
    """

    def __init__(self, recipe: bytes, connection: socket.socket, model: str = "") -> None:
        if model:
            parts = json.loads(recipe)
            parts["config"]["model"]["model"] = model
            recipe = json.dumps(parts).encode()
        self._heartbeat = HeartbeatMemory()
        child = WorkerChild(connection, self._heartbeat.descriptor)
        child.tell(recipe)
        self._process = child.process

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """Kills the process if it still runs. May be called twice."""
        self._process.kill()
        self._process.wait()
        self._heartbeat.close()
