"""The scheduler side of the disk connector: looks for the blocks of a prompt in a folder.

It only asks whether a file exists; the worker side reads and writes files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from frame.interfaces import ConnectorSetup, RequestView

from ..blocks.files import BlockFiles
from ..blocks.scheduler import BlockScheduler
from .messages import DiskOptions, loads_later

logger = logging.getLogger("frame.connectors.disk")


class DiskScheduler(BlockScheduler):
    """See the module."""

    title = "disk"

    def __init__(self, setup: ConnectorSetup, options: DiskOptions) -> None:
        super().__init__(setup, options)
        self._folder = options.folder
        self._files = BlockFiles(options.folder)
        self._max_bytes = options.max_bytes

    def connect(self, handshakes: Mapping[int, bytes]) -> None:
        """Raises `ValueError` when a worker writes its blocks to a folder that this side cannot see."""
        formats, marks = {}, {}
        for rank, handshake in handshakes.items():
            formats[rank], marks[rank] = handshake.split()
        super().connect(formats)
        for rank, mark in marks.items():
            if not self._files.take_mark(mark.decode()):
                raise ValueError(
                    f"the disk connector's folder {self._folder} is another one where the worker of rank {rank} runs: "
                    "name a folder that all machines and containers of the engine share"
                )
        size = "as many as there is room for"
        if self._max_bytes is not None:
            size = f"at most {self._max_bytes / (1 << 30):.3g} GiB"
        logger.info("disk connector: blocks of %d tokens in %s, %s", self.layout.grain, self._folder, size)

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        count = self.longest(request, first, last, self._has)
        return count, count > 0 and loads_later(self.layout, self.setup.mesh)

    def reset(self) -> bool:
        """Removes the blocks of this model, also for other engines that use the folder."""
        self._files.clear(self.blocks_name)
        return True

    def _has(self, key: bytes) -> bool:
        return bool(self.spaces) and all(self._files.has(space, key) for space in self.spaces)
