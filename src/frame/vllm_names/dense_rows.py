"""Runs logits processors that expect a dense batch, by turning the slots of a step into dense rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from frame.core.interfaces.logits import LogitsProcessor
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.setup import ProcessorSetup

from .processors import BatchLogitsProcessor, BatchUpdate, MoveDirectionality


class _Entry(NamedTuple):
    slot: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int]


class DenseRows:
    """Numbers the running requests as the dense rows 0 … n - 1 that a batch processor expects.

    Each step gets the `BatchUpdate` that turns the rows of the previous step into its own. New requests take the rows
    of finished requests, the lowest row first, and are appended when these are used up. Where more requests finished
    than began, the last rows are moved into the empty ones. Then rows are swapped into the order of the step.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._finished: set[int] = set()
        self._new: dict[int, _Entry] = {}

    def add(self, slot: int, params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> None:
        """Notes that a request took `slot`, and that the request that held it before has left."""
        self.remove(slot)
        self._new[slot] = _Entry(slot, params, prompt_ids, output_ids)

    def remove(self, slot: int) -> None:
        """Notes that the request in `slot` has left. No update names a request that left before its first update."""
        if self._new.pop(slot, None) is None and slot in self.rows:
            self._finished.add(slot)

    def update(self, order: Sequence[int]) -> BatchUpdate | None:
        """Assigns the rows of this step, first those of the slots in `order`; None if no row changed."""
        rows: list[int | None] = [None if slot in self._finished else slot for slot in self.rows]
        holes = [row for row, slot in enumerate(rows) if slot is None]
        added = []
        for entry in self._new.values():
            row = holes.pop(0) if holes else len(rows)
            rows[row : row + 1] = [entry.slot]
            added.append((row, entry.params, entry.prompt_ids, entry.output_ids))
        removed = holes[::-1]
        moved = _condense(rows, holes)
        self.rows = [slot for slot in rows if slot is not None]
        moved += _reorder(self.rows, order)
        self._finished.clear()
        self._new.clear()
        if not (added or removed or moved):
            return None
        return BatchUpdate(batch_size=len(self.rows), removed=removed, added=added, moved=moved)


def _condense(rows: list[int | None], holes: list[int]) -> list[tuple[int, int, MoveDirectionality]]:
    moved = []
    for hole in holes:
        while rows and rows[-1] is None:
            rows.pop()
        if hole >= len(rows):
            break
        moved.append((len(rows) - 1, hole, MoveDirectionality.UNIDIRECTIONAL))
        rows[hole] = rows.pop()
    return moved


def _reorder(rows: list[int], order: Sequence[int]) -> list[tuple[int, int, MoveDirectionality]]:
    moved = []
    if rows[: len(order)] != list(order):
        place = {slot: row for row, slot in enumerate(rows)}
        for row, slot in enumerate(order):
            other = place[slot]
            if other != row:
                moved.append((row, other, MoveDirectionality.SWAP))
                rows[row], rows[other] = rows[other], rows[row]
                place[rows[other]] = other
    return moved


class BatchProcessorAdapter(LogitsProcessor):
    """A `LogitsProcessor`, whose state follows slots, that runs a batch processor.

    Every request opts in, because a batch processor does not say which requests it changes; so each step waits for the
    tokens of the step before. Requests that a step leaves out get rows of zeros behind the others.
    """

    needs_output_ids = True

    def __init__(self, processor: BatchLogitsProcessor, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self.processor = processor
        self.argmax_invariant = bool(processor.is_argmax_invariant())
        self._dense = DenseRows()

    def add(self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], output_ids: list[int]) -> bool:
        self._dense.add(slot, params, list(prompt_ids), output_ids)
        return True

    def remove(self, slot: int) -> None:
        self._dense.remove(slot)

    def apply(self, logits: Tensor, slots: Sequence[int]) -> Tensor:
        self.processor.update_state(self._dense.update(slots))
        missing = len(self._dense.rows) - len(slots)
        if not missing:
            return self.processor.apply(logits)
        padded = torch.cat([logits, logits.new_zeros((missing, logits.shape[-1]))])
        return self.processor.apply(padded)[: len(slots)]
