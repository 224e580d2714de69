"""The worker side of the decode-bench connector: fills blocks with numbers that are finite and not zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import CacheView, ConnectorWorker, ConnectorWorkerSetup, TransferReport, decode

from .messages import DecodeBenchOptions, FillStep

#: Blocks that are filled together: bounds the memory that drawn numbers take.
_BATCH = 64


class DecodeBenchWorker(ConnectorWorker):
    """See the module."""

    def __init__(self, setup: ConnectorWorkerSetup, options: DecodeBenchOptions) -> None:
        super().__init__(setup, options)
        self._mean, self._std = options.fill_mean, options.fill_std
        self._views: list[CacheView] = []
        self._rows: list[Tensor] = []  # of each view: the bytes of a block, where all are equal
        self._num_filled = 0

    def register(self, caches: Mapping[str, CacheView]) -> None:
        self._views = list(caches.values())
        self._rows = [] if self._std else [self._made_up(view, 1) for view in self._views]

    def begin_step(self, message: bytes) -> None:
        if not message:
            return
        step = decode(message, FillStep)
        for group, blocks in enumerate(step.blocks):
            for start in range(0, len(blocks), _BATCH):
                self._fill(group, blocks[start : start + _BATCH])
        self._num_filled += max(map(len, step.blocks))

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        del finished
        count, self._num_filled = self._num_filled, 0
        return TransferReport(counters={"decode_bench_filled_blocks": float(count)} if count else {})

    def pending_loads(self) -> list[str]:
        return []

    def _fill(self, group: int, blocks: Sequence[int]) -> None:
        places = self.setup.streams.stage(np.asarray(blocks, np.int64))
        for number, view in enumerate(self._views):
            if view.group == group:
                rows = self._made_up(view, len(blocks)) if self._std else self._rows[number].expand(len(blocks), -1)
                view.bytes.index_copy_(0, places, rows)

    def _made_up(self, view: CacheView, count: int) -> Tensor:
        """The bytes of blocks [count, block_bytes]; of formats that are no plain numbers each byte is 1."""
        dtype, device, size = view.format.dtype, view.bytes.device, view.bytes.shape[1]
        if not dtype.is_floating_point or size % dtype.itemsize:
            return torch.ones(count, size, dtype=torch.uint8, device=device)
        most = torch.finfo(dtype).max
        values = torch.full((count, size // dtype.itemsize), self._mean, device=device)
        if self._std:
            values += torch.randn(values.shape, device=device) * self._std
        return values.clamp_(-most, most).to(dtype).view(torch.uint8)
