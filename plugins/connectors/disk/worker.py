"""The worker side of the disk connector: blocks in files, read and written within the step. Knows no tensor."""

from __future__ import annotations

import time

import numpy as np

from frame.interfaces import ConnectorWorkerSetup

from ..blocks.files import BlockFiles
from ..blocks.messages import BlockStep
from ..blocks.worker import BlockWorker, batches
from .messages import DiskOptions, loads_later


class DiskWorker(BlockWorker):
    """See the module."""

    title = "disk"

    def __init__(self, setup: ConnectorWorkerSetup, options: DiskOptions) -> None:
        super().__init__(setup, options)
        self._max_bytes = options.max_bytes
        self._files = BlockFiles(options.folder, max_bytes=options.max_bytes, fsync=options.fsync)
        self._loaded: list[str] = []

    def handshake(self) -> bytes:
        return super().handshake() + b" " + self._files.leave_mark().encode()

    def load(self, step: BlockStep) -> None:
        begun = time.monotonic()
        for moves in batches(step.loads):
            data = self.rows_for(moves)
            read = [self._files.read(self.space, move.key, data[row]) for row, move in enumerate(moves)]
            self.put(moves, data, np.flatnonzero(read).tolist())
        if loads_later(self.layout, self.setup.mesh):  # else the step that loads goes on with what it loaded
            self._loaded += dict.fromkeys(move.owner for move in step.loads)
        if step.loads and self.rank == 0:
            self.count("load_seconds", time.monotonic() - begun)

    def pending_loads(self) -> list[str]:
        return self._loaded

    def loaded(self) -> list[str]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def keeps(self, key: bytes) -> bool:
        return self._files.touch(self.space, key)

    def keep(self, key: bytes, data: np.ndarray) -> bool:
        begun = time.monotonic()
        kept = self._files.write(self.space, key, data)
        if self.rank == 0:  # the others write at the same time
            self.count("save_seconds", time.monotonic() - begun)
        self.count("save_bytes", kept * data.nbytes)
        return kept

    def gauges(self) -> dict[str, float]:
        used = self._files.used_bytes
        if self._max_bytes is None or used is None:
            return {}
        return {"disk_used_bytes": float(used), "disk_size_bytes": float(self._max_bytes)}
