"""The actor that runs one worker of an engine on a Ray node. It holds the resources; the worker has its own process."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from frame.interfaces import WorkerProcess
from frame.links.greeting import connect, receive_bytes
from frame.links.versions import versions

from .ray_room import device_number


class RayWorker:
    """Starts a worker where Ray has placed this actor, and ends it."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    def describe(self) -> dict[str, Any]:
        """Where the actor is, what it has, and the versions that it would compute with."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        devices = [device_number(str(gpu), os.environ.get("CUDA_VISIBLE_DEVICES")) for gpu in gpus]
        return {"address": ray.util.get_node_ip_address(), "devices": devices, "versions": versions()}

    def start(self, host: str, port: int, key: bytes, rank: int) -> None:
        """Starts the worker of that rank, which talks to the engine that listens at `host`:`port`."""
        with connect(host, port, key, {"worker": rank}) as connection:
            self._worker = WorkerProcess(receive_bytes(connection), connection)

    def status(self) -> int | None:
        """The exit status of the worker, which the engine takes to be gone; None where it still runs."""
        latest = time.monotonic() + 1.0
        while self._worker is not None and self._worker.poll() is None and time.monotonic() < latest:
            time.sleep(0.01)
        return None if self._worker is None else self._worker.poll()

    def stop(self) -> None:
        """Ends the worker's process, if it has not ended with its connection."""
        if self._worker is not None:
            self._worker.close()
