"""Copies of blocks between the device and rows of host memory, through a buffer on the device for each direction.

In the buffer all layers of a block lie side by side, so that it crosses to the host in one piece. Knows no request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from frame.interfaces import Mark, Streams

from ..blocks.host_slab import HostSlab
from ..blocks.layer_copies import LayerCopies
from ..blocks.messages import Move
from ..blocks.step_worker import Part
from .options import buffer_rows
from .row_sums import RowSums


@dataclass(eq=False)
class Copy:
    """Copies under way: of message `number`, for the request `owner` if they are loads; `moves` with their `rows`.

    `states` are what is loaded besides, with their rows. `finite` [n] says of saves which hold numbers only, and `sums`
    [n] are checksums of their rows, once `mark` is passed. `places` are those of saves among the `total` of their
    message, `marks` what the rows are to be known by. `error` is what a copy raised.
    """

    number: int
    owner: str
    moves: Sequence[Move]
    rows: Sequence[int]
    places: Sequence[int] = ()
    total: int = 0
    states: Sequence[tuple[Move, int]] = ()
    finite: Tensor | None = None
    sums: Tensor | None = None
    marks: Sequence[tuple[bytes, int]] = ()
    begun: float = field(default_factory=time.monotonic)
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None


class RowCopies:
    """Between `slab` and the device; `parts` say where each layer's blocks are, and change when its memory does."""

    def __init__(self, slab: HostSlab, device: torch.device, streams: Streams) -> None:
        self.parts: Sequence[Part] = ()
        self._slab = slab
        self._layers = LayerCopies(streams, device)
        count = buffer_rows(slab.row_bytes)
        self._load_buffer, self._save_buffer = (
            torch.empty((count, slab.row_bytes), dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._sums = RowSums(slab.row_bytes, device) if slab.identity else None

    def compile(self) -> None:
        """Has the device's kernel compiled, once `parts` are known."""
        self._layers.compile(self.parts, self._save_buffer)

    def read(self, copy: Copy) -> None:
        """From host memory to the blocks of `copy.moves`."""
        buffer = self._load_buffer
        for start in range(0, len(copy.moves), len(buffer)):
            moves, rows = copy.moves[start : start + len(buffer)], copy.rows[start : start + len(buffer)]
            for place, run in self.runs(rows):
                buffer[place : place + len(run)].copy_(run, non_blocking=True)
            self._layers.scatter(self.parts, moves, buffer[: len(moves)])

    def write(self, copy: Copy) -> None:
        """From the blocks of `copy.moves` to host memory."""
        buffer, finite = self._save_buffer, copy.finite
        for start in range(0, len(copy.moves), len(buffer)):
            moves, rows = copy.moves[start : start + len(buffer)], copy.rows[start : start + len(buffer)]
            end = start + len(moves)
            good = self._layers.gather(self.parts, moves, buffer[: len(moves)])
            for place, run in self.runs(rows):
                run.copy_(buffer[place : place + len(run)], non_blocking=True)
            if copy.sums is not None and self._sums is not None:
                copy.sums[start:end].copy_(self._sums(buffer[: len(moves)]), non_blocking=True)
            if finite is not None:
                finite[start:end].copy_(good, non_blocking=True)

    def runs(self, rows: Sequence[int]) -> Sequence[tuple[int, Tensor]]:
        """See `HostSlab.runs`."""
        return list(self._slab.runs(rows))
