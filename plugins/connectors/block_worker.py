"""The worker side of connectors that store prompt blocks: copies blocks between KV memory and host within a step.

Blocks of a step or a load that failed are never saved, because a wrong block would outlive the engine. Knows of a
request only its id, of a layer only its bytes, and not where blocks are stored.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import CacheView, ConnectorWorker, ConnectorWorkerSetup, TransferReport, decode, encode

from .block_messages import BlockStep, Move

#: Blocks that are copied together: bounds the host memory that a step needs.
BATCH = 32
#: dtype → the dtype in which its values are checked for being finite; torch has no such check for 8-bit floats
CHECKED = {
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float8_e4m3fn: torch.float16,
    torch.float8_e5m2: torch.float16,
}


@dataclass(frozen=True)
class Part:
    """Where the bytes of one layer lie in a stored block, which holds `count` blocks of the layer's KV group.

    `cache` is uint8 [num_blocks, (end - start) / count].
    """

    group: int
    cache: Tensor
    dtype: torch.dtype
    count: int
    start: int
    end: int


class BlockWorker(ConnectorWorker):
    """See the module. A stored block holds a grain of tokens in every layer of this rank, group by group.

    `title` is the prefix of its counters' names; `message` is the type of the scheduler side's message.
    """

    title: ClassVar[str]
    message: ClassVar[type[BlockStep]] = BlockStep

    def __init__(self, setup: ConnectorWorkerSetup, options: Any) -> None:
        super().__init__(setup, options)
        self.place = self.rank % setup.mesh.engine_size  # among the workers of this engine, whose blocks are apart
        self.block_bytes = 0
        self.formats = ""  # names how blocks lie in memory, once `register` was called
        self.failed: list[tuple[int, int]] = []
        self._parts: list[Part] = []
        self._step = BlockStep(blocks_name="")
        self.next_number = -1  # of the next message; -1: none came yet, and so no owner is sound
        self._in_step = False
        self._breaks = 0
        self._reported_breaks = 0
        self._sound: set[str] = set()  # requests whose blocks hold what their hashes say
        self._counters: dict[str, float] = {}

    @abstractmethod
    def load(self, step: BlockStep) -> None:
        """Starts the loads of a step; they may end in a later step."""

    @abstractmethod
    def keeps(self, key: bytes) -> bool:
        """Whether the block is stored already; if so, it counts as used now."""

    @abstractmethod
    def keep(self, key: bytes, data: np.ndarray) -> bool:
        """Stores a block: copies `data`, uint8 [block_bytes], which changes later. False when it cannot be stored."""

    def lost(self, skipped: range, broken: int) -> None:
        """Called when steps had failed: messages `skipped` never came, the one `broken` (-1: none) saved nothing."""

    def loaded(self) -> list[str]:
        """Ids of the requests whose loads, which no step was to wait for, have ended since the last call."""
        return []

    @property
    def space(self) -> str:
        """The name of this rank's blocks, of which the newest message gave the first part."""
        return f"{self._step.blocks_name}/{self.place}-{self.formats}"

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches and self.formats:
            self._parts = []  # copies end within their step
            return
        self._parts, start, formats = [], 0, []
        for group in self.layout.groups:
            count = self.layout.grain // group.block_size
            for view in (caches[layer] for layer in group.layers if layer in caches):
                end = start + count * view.bytes.shape[1]
                self._parts.append(Part(view.group, view.bytes, view.format.dtype, count, start, end))
                formats.append([list(view.format.shape), list(view.format.order), str(view.format.dtype)])
                start = end
        self.block_bytes = start
        self.formats = hashlib.sha256(encode(formats)).hexdigest()[:16]

    def handshake(self) -> bytes:
        return self.formats.encode()

    def begin_step(self, message: bytes) -> None:
        step = decode(message, self.message) if message else BlockStep(blocks_name="")
        skipped = range(self.next_number, step.number) if self.next_number >= 0 else range(0)
        if self._in_step or skipped:
            # An earlier step raised, maybe before it came here. Steps planned before the scheduler knew of that build
            # on blocks that it never filled.
            self._breaks += 1
            self._sound.clear()
            self.lost(skipped, self._step.number if self._in_step else -1)
        if not self._in_step:
            self.failed, self._counters = [], {}
        self._in_step = True
        self.next_number = max(self.next_number, step.number + 1) if message else self.next_number
        self._step = step
        if step.known_breaks.get(self.rank, 0) == self._breaks:
            self._sound.update(step.entered)
        self.load(step)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        saves = [move for move in self._step.saves if move.owner in self._sound and not self.keeps(move.key)]
        for moves in batches(saves):
            self._save(moves)
        self._sound.difference_update(finished)
        self._in_step = False
        notes = []
        if self._reported_breaks != self._breaks:
            self._reported_breaks = self._breaks
            notes.append((self.rank, encode(self._breaks)))
        return TransferReport(received=self.loaded(), failed_blocks=self.failed, counters=self._counters, notes=notes)

    def count(self, name: str, value: float) -> None:
        """Adds `value` to the counter `title`_`name` of this step."""
        if value:
            name = f"{self.title}_{name}"
            self._counters[name] = self._counters.get(name, 0) + value

    def put(self, moves: Sequence[Move], data: np.ndarray, arrived: Sequence[int]) -> None:
        """Writes the rows `arrived` of `data` uint8 [n, block_bytes] to the blocks of `moves` [n]; the rest failed."""
        rows = torch.from_numpy(data)
        for part in self._parts:
            needed = [
                (place, block)
                for row in arrived
                for place, block in enumerate(moves[row].blocks[part.group], row * part.count)
                if block
            ]
            if needed:
                places, blocks = torch.tensor(needed).unbind(1)
                found = rows[:, part.start : part.end].reshape(-1, part.cache.shape[1])[places]
                part.cache.index_copy_(0, blocks.to(part.cache.device), found.to(part.cache.device))
        there = set(arrived)
        for row, move in enumerate(moves):
            if row not in there:
                self.failed += [(group, block) for group, some in enumerate(move.blocks) for block in some if block]
                self._sound.discard(move.owner)
        self.count("loaded_blocks", len(there))
        self.count("failed_blocks", len(moves) - len(there))

    def _save(self, moves: Sequence[Move]) -> None:
        data = np.empty((len(moves), self.block_bytes), np.uint8)
        finite = torch.ones(len(moves), dtype=torch.bool)
        for part in self._parts:
            blocks = torch.tensor([move.blocks[part.group] for move in moves], device=part.cache.device)
            found = part.cache.index_select(0, blocks.flatten()).view(len(moves), -1)
            if part.dtype in CHECKED:
                finite &= found.view(part.dtype).to(CHECKED[part.dtype]).isfinite().all(1).cpu()
            data[:, part.start : part.end] = found.cpu().numpy()
        kept = 0
        for row, move in enumerate(moves):
            # values that are not finite fail the request that made them; they must not fail later ones
            kept += bool(finite[row]) and self.keep(move.key, data[row])
        self.count("saved_blocks", kept)
        self.count("unsaved_blocks", len(moves) - kept)


def batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """`moves` in batches that are copied together."""
    for start in range(0, len(moves), BATCH):
        yield moves[start : start + BATCH]
