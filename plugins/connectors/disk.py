"""The scheduler side of the disk connector: finds the blocks of a prompt in a folder, and has new ones saved.

Knows files by name only; the worker side reads and writes them.
"""

from __future__ import annotations

from typing import Any

from frame.interfaces import KVLayout, RequestView

from .block_files import BlockFiles
from .block_scheduler import BlockScheduler
from .disk_messages import DiskOptions


class DiskScheduler(BlockScheduler):
    """See the module."""

    title = "disk"

    def __init__(self, *, config: Any, options: DiskOptions, layout: KVLayout) -> None:
        super().__init__(config=config, options=options, layout=layout)
        self._files = BlockFiles(options.folder)
        num_ranks = config.executor.tensor_parallel_size * config.executor.pipeline_parallel_size
        self._spaces = [f"{self.blocks_name}/{rank}" for rank in range(num_ranks)]

    def match(self, request: RequestView, first: int, last: int) -> tuple[int | None, bool]:
        index = first
        while index < last and self._has(request.block_hashes[index]):
            index += 1
        return max(0, index - first) * self.layout.block_size, False

    def reset(self) -> bool:
        """Forgets the blocks of these weights, for every engine on the folder."""
        self._files.clear(self.blocks_name)
        return True

    def _has(self, key: bytes) -> bool:
        return all(self._files.has(space, key) for space in self._spaces)
