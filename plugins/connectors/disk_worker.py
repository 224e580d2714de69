"""The worker side of the disk connector: copies blocks between the KV memory and files, within the step.

What came from a broken step or from a load that failed is never saved: a wrong block in the folder would outlive the
engine. Knows no request beyond its id, and no layer beyond its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.core.interfaces.connector import ConnectorWorker
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.step import TransferReport
from frame.core.interfaces.wire import decode, encode

from .block_files import BlockFiles
from .disk_messages import DiskOptions, DiskStep, Move

#: Blocks that are copied together: bounds the host memory that a step needs.
BATCH = 32
_CHECKED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Part:
    """Where the bytes of one layer lie in a file; `cache` is uint8 [num_blocks, end - start]."""

    group: int
    cache: Tensor
    dtype: torch.dtype
    start: int
    end: int


class DiskWorker(ConnectorWorker):
    """See the module. A file holds the block in every layer of this rank, group by group."""

    def __init__(self, *, config: Any, options: DiskOptions, layout: KVLayout, rank: int = 0) -> None:
        super().__init__(config=config, options=options, layout=layout, rank=rank)
        self._files = BlockFiles(options.folder, max_bytes=options.max_bytes, fsync=options.fsync)
        self._parts: list[Part] = []
        self._block_bytes = 0
        self._step = DiskStep(blocks_name="")
        self._in_step = False
        self._breaks = 0
        self._reported_breaks = 0
        self._sound: set[str] = set()  # requests whose blocks hold what their hashes say
        self._failed: list[int] = []
        self._stats: dict[str, float] = {}

    def register(self, caches: Mapping[str, Tensor]) -> None:
        self._parts, start = [], 0
        for index, group in enumerate(self.layout.groups):
            for layer in (layer for layer in group.layers if layer in caches):
                cache = caches[layer]
                end = start + cache.shape[1]
                self._parts.append(Part(index, cache, getattr(torch, group.spec.dtype), start, end))
                start = end
        self._block_bytes = start

    def begin_step(self, message: bytes) -> None:
        if self._in_step:
            # The step before raised. Steps planned before the scheduler heard of it build on blocks it never filled.
            self._breaks += 1
            self._sound.clear()
        self._in_step, self._failed, self._stats = True, [], {}
        self._step = step = decode(message, DiskStep) if message else DiskStep(blocks_name="")
        if step.known_breaks.get(self.rank, 0) == self._breaks:
            self._sound.update(step.entered)
        for moves in _batches(step.loads):
            self._load(moves)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        space = self._space
        saves = [
            move for move in self._step.saves if move.owner in self._sound and not self._files.touch(space, move.key)
        ]
        for moves in _batches(saves):
            self._save(moves)
        self._sound.difference_update(finished)
        self._in_step = False
        events = []
        if self._reported_breaks != self._breaks:
            self._reported_breaks = self._breaks
            events.append(encode((self.rank, self._breaks)))
        return TransferReport(failed_blocks=self._failed, stats=self._stats, events=events)

    @property
    def _space(self) -> str:
        return f"{self._step.blocks_name}/{self.rank}"

    def _count(self, name: str, value: int) -> None:
        if value:
            self._stats[name] = self._stats.get(name, 0) + value

    def _load(self, moves: Sequence[Move]) -> None:
        data = np.empty((len(moves), self._block_bytes), np.uint8)
        arrived = []
        for row, move in enumerate(moves):
            if self._files.read(self._space, move.key, data[row]):
                arrived.append(row)
            else:
                self._failed += [block for block in move.blocks if block]
                self._sound.discard(move.owner)
        self._count("disk_loaded_blocks", len(arrived))
        self._count("disk_failed_blocks", len(moves) - len(arrived))
        rows = torch.from_numpy(data)
        for part in self._parts:
            here = [row for row in arrived if moves[row].blocks[part.group]]
            if here:
                blocks = torch.tensor([moves[row].blocks[part.group] for row in here], device=part.cache.device)
                part.cache.index_copy_(0, blocks, rows[here, part.start : part.end].to(part.cache.device))

    def _save(self, moves: Sequence[Move]) -> None:
        data = np.empty((len(moves), self._block_bytes), np.uint8)
        finite = torch.ones(len(moves), dtype=torch.bool)
        for part in self._parts:
            blocks = torch.tensor([move.blocks[part.group] for move in moves], device=part.cache.device)
            found = part.cache.index_select(0, blocks)
            if part.dtype in _CHECKED:
                finite &= found.view(part.dtype).isfinite().all(1).cpu()
            data[:, part.start : part.end] = found.cpu().numpy()
        kept = 0
        for row, move in enumerate(moves):
            # values that are not finite fail the request that made them; they must not fail later ones
            kept += bool(finite[row]) and self._files.write(self._space, move.key, data[row])
        self._count("disk_saved_blocks", kept)
        self._count("disk_unsaved_blocks", len(moves) - kept)


def _batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    for start in range(0, len(moves), BATCH):
        yield moves[start : start + BATCH]
