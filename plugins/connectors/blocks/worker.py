"""The worker side of connectors that store prompt blocks: copies blocks between KV memory and host within a step.

Knows of a request only its id, of a layer only its bytes, and not where blocks are stored.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from frame.interfaces import ConnectorWorkerSetup, TransferReport, encode

from .messages import Move
from .step_worker import CHECKED, StepWorker

#: Blocks that are copied together: bounds the host memory that a step needs.
BATCH = 32


class BlockWorker(StepWorker):
    """See the module. Copies end within their step."""

    def __init__(self, setup: ConnectorWorkerSetup, options: Any) -> None:
        super().__init__(setup, options)
        self._reported_breaks = 0

    @abstractmethod
    def keeps(self, key: bytes) -> bool:
        """Whether the block is stored already; if so, it counts as used now."""

    @abstractmethod
    def keep(self, key: bytes, data: np.ndarray) -> bool:
        """Stores a block: copies `data`, uint8 [its bytes], which changes later. False when it cannot be stored."""

    def loaded(self) -> list[str]:
        """Ids of the requests whose loads, which no step was to wait for, have ended since the last call."""
        return []

    def gauges(self) -> dict[str, float]:
        """What is to be shown of where blocks are stored."""
        return {}

    def save_states(self, moves: Sequence[Move]) -> None:
        self._save_all(moves)

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self._save_all(self._step.saves)
        self._sound.difference_update(finished)
        self._in_step = False
        notes = []
        if self._reported_breaks != self._breaks:
            self._reported_breaks = self._breaks
            notes.append((self.rank, encode(self._breaks)))
        return TransferReport(
            received=self.loaded(),
            failed_blocks=self.failed,
            counters=self._counters,
            gauges=self.gauges(),
            notes=notes,
        )

    def put(self, moves: Sequence[Move], data: np.ndarray, arrived: Sequence[int]) -> None:
        """Writes the rows `arrived` of `data` uint8 [n, bytes of one] to the blocks of `moves` [n]; the rest failed."""
        rows = torch.from_numpy(data)
        for part in self.stored(moves).parts:
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
        self.count("load_bytes", len(there) * data.shape[1])
        lost = [move for row, move in enumerate(moves) if row not in there]
        self._sound.difference_update(move.owner for move in lost)
        self.count("loaded_states" if moves[0].state else "loaded_blocks", len(there))
        self.fail(lost)

    def rows_for(self, moves: Sequence[Move]) -> np.ndarray:
        """Host memory for the stored blocks of `moves`, uint8 [n, bytes of one]."""
        return np.empty((len(moves), self.stored(moves).num_bytes), np.uint8)

    def _save_all(self, moves: Sequence[Move]) -> None:
        for part in batches([move for move in moves if move.owner in self._sound and not self.keeps(move.key)]):
            self._save(part)

    def _save(self, moves: Sequence[Move]) -> None:
        data = self.rows_for(moves)
        finite = torch.ones(len(moves), dtype=torch.bool)
        for part in self.stored(moves).parts:
            blocks = torch.tensor([move.blocks[part.group] for move in moves], device=part.cache.device)
            found = part.cache.index_select(0, blocks.flatten()).view(len(moves), -1)
            if part.dtype in CHECKED:
                finite &= found.view(part.dtype).to(CHECKED[part.dtype]).isfinite().all(1).cpu()
            data[:, part.start : part.end] = found.cpu().numpy()
        kept = 0
        for row, move in enumerate(moves):
            # values that are not finite fail the request that made them; they must not fail later ones
            kept += bool(finite[row]) and self.keep(move.key, data[row])
        what = "states" if moves[0].state else "blocks"
        self.count(f"saved_{what}", kept)
        self.count(f"unsaved_{what}", len(moves) - kept)


def batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """`moves` in batches that are copied together, each of tokens or of a state, which is as large as many of those."""
    tokens = [move for move in moves if not move.state]
    for start in range(0, len(tokens), BATCH):
        yield tokens[start : start + BATCH]
    yield from ([move] for move in moves if move.state)
