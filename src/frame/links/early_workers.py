"""Worker processes that are started before their engine knows what they are for, so that all load libraries together.

Importing torch takes seconds, in the engine's process and in those of its workers, which are of no use before the
engine has checked its configuration and knows what each of them is to do. Whoever is not needed then is ended. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.core.plugin_host.setups import mesh_of
from frame.core.processes.python_command import python_command
from frame.core.startup.openmp import child_environment
from frame.core.worker.heartbeat import HeartbeatMemory

from .processors import num_processors

#: The tag of an executor's provider that says that it spawns a worker of this machine for each rank.
SPAWNS = "spawns"


class WorkerChild:
    """The process of a worker, which talks over `connection` and beats into the memory of descriptor `heartbeat`.

    It waits for its recipe, and before loads what `outline` names, a line of JSON; nothing where that is empty.
    """

    def __init__(self, connection: socket.socket, heartbeat: int, outline: bytes = b"") -> None:
        passed = connection.fileno(), heartbeat
        self.process = subprocess.Popen(
            python_command("frame", "worker", str(passed[0]), "--heartbeat", str(passed[1])),
            stdin=subprocess.PIPE,
            pass_fds=passed,
            env=child_environment(),
        )
        self._write(outline + b"\n")

    def tell(self, recipe: bytes) -> None:
        """Gives it its recipe, once; one that is dead shows that later, as any worker does."""
        self._write(recipe)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def end(self) -> None:
        """Kills it; for one that was told nothing."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(data)
            self._stdin.flush()

    @property
    def _stdin(self) -> Any:
        return self.process.stdin


class LinkedChild:
    """A `WorkerChild`, and this side of what joins it to the engine."""

    def __init__(self, outline: bytes = b"") -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.heartbeat = HeartbeatMemory()
        with theirs:
            self.child = WorkerChild(theirs, self.heartbeat.descriptor, outline)

    def end(self) -> None:
        """Kills it and frees everything; for one that was told nothing."""
        self.child.end()
        self.connection.close()
        self.heartbeat.close()


class EarlyWorkers:
    """`count` processes that load what a configuration with this choice of plugins needs.

    As a context it ends those that nobody took.
    """

    def __init__(self, count: int, config: FrameConfig | None = None, plugins: Sequence[Any] = ()) -> None:
        parts = {"config": config.to_plain() if config is not None else {}, "plugins": list(plugins)}
        self._left: list[LinkedChild] = []
        try:
            for _ in range(count):
                self._left.append(LinkedChild(json.dumps(parts).encode()))
        except BaseException:
            self.close()
            raise

    def take(self) -> LinkedChild:
        """One of them; another one, that has loaded nothing, where none is left."""
        return self._left.pop(0) if self._left else LinkedChild()

    def close(self) -> None:
        """Ends those that nobody took. May be called twice."""
        while self._left:
            self._left.pop().end()

    def __enter__(self) -> EarlyWorkers:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def begin_workers(config: FrameConfig, registry: Registry) -> EarlyWorkers:
    """Starts as many workers as the engine of `config` will spawn; none where it probably spawns none.

    Nor where it may use fewer processors than there are processes: an error of the configuration would come later then.
    """
    engines, workers = config.data_parallel.data_parallel_size, mesh_of(config).engine_size
    if engines * (workers + 1) > num_processors() or not _spawns(config, registry):
        return EarlyWorkers(0)
    try:
        return EarlyWorkers(workers, config, registry.choices(config))
    except (PluginError, ConfigError):
        return EarlyWorkers(0)  # whoever writes the recipes of workers raises the error


def _spawns(config: FrameConfig, registry: Registry) -> bool:
    name = config.executor.executor
    if name == "auto":
        return config.executor.nnodes == 1 and mesh_of(config).engine_size > 1
    try:
        return SPAWNS in registry.choose("executor", name).tags
    except PluginError:
        return False  # whoever makes the executor raises the error
