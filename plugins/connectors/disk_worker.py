"""The worker side of the disk connector: blocks in files, read and written within the step. Knows no tensor."""

from __future__ import annotations

import numpy as np

from frame.interfaces import ConnectorWorkerSetup

from .block_files import BlockFiles
from .block_messages import BlockStep
from .block_worker import BlockWorker, batches
from .disk_messages import DiskOptions, loads_later


class DiskWorker(BlockWorker):
    """See the module."""

    title = "disk"

    def __init__(self, setup: ConnectorWorkerSetup, options: DiskOptions) -> None:
        super().__init__(setup, options)
        self._files = BlockFiles(options.folder, max_bytes=options.max_bytes, fsync=options.fsync)
        self._loaded: list[str] = []

    def handshake(self) -> bytes:
        return super().handshake() + b" " + self._files.leave_mark().encode()

    def load(self, step: BlockStep) -> None:
        for moves in batches(step.loads):
            data = self.rows_for(moves)
            read = [self._files.read(self.space, move.key, data[row]) for row, move in enumerate(moves)]
            self.put(moves, data, np.flatnonzero(read).tolist())
        if loads_later(self.layout, self.setup.mesh):  # else the step that loads goes on with what it loaded
            self._loaded += dict.fromkeys(move.owner for move in step.loads)

    def loaded(self) -> list[str]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def keeps(self, key: bytes) -> bool:
        return self._files.touch(self.space, key)

    def keep(self, key: bytes, data: np.ndarray) -> bool:
        return self._files.write(self.space, key, data)
