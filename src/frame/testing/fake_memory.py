"""The memory in which a fake worker keeps its cache: per token and layer, whose prefix it is of, and where it belongs.

Every rank keeps its own heads of a layer, or all of what ranks do not divide. Knows no step and no request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from frame.core.interfaces.attention import BlockFormat
from frame.core.interfaces.connector import CacheView, StateRun
from frame.core.interfaces.kv import AnyKVSpec, FullKV, KVLayout, LatentKV, StateKV
from frame.core.interfaces.step import BlockCopy
from frame.core.worker.start.kv_memory import KVMemory

from .fake_cache import BAD, HEAD_DIM, HEADS


class FakeMemory:
    """The cache of one rank. `views` is what connectors see of it: all but an encoder's tokens."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._groups = layout.groups
        self._rank = rank
        self.lost = False
        caches = KVMemory(layout, torch.device("cpu")).layer_bytes()
        self.views: dict[str, CacheView] = {}
        # by layer, int32 [num_blocks, tokens of a block, what a token keeps…], without a copy
        self._rows: dict[str, np.ndarray] = {}
        for index, group in enumerate(layout.groups):
            for layer, spec in zip(group.layers, group.specs, strict=True):
                block = _block_format(spec, group.block_size)
                rows = block.view(caches[layer]).view(torch.int32).numpy()
                self._rows[layer] = np.moveaxis(rows, 0, 2) if block.block_axis else rows
                if group.keeps_states:
                    raw = BlockFormat((caches[layer].shape[1],), (0,), torch.uint8)
                    kept, mine = ((torch.float32, caches[layer].shape[1]),), _heads_of(spec, rank)
                    runs = (StateRun(torch.float32, 4 * HEAD_DIM, mine.start, mine.stop, HEADS),) * 2
                    self.views[layer] = CacheView(caches[layer], raw, index, None, 1, kept, runs)
                elif not group.keeps_encoded:
                    heads, total = (None, 0) if block.head_axis is None else (_heads_of(spec, rank), HEADS)
                    part = None if heads is None else (heads.start, heads.stop)
                    self.views[layer] = CacheView(caches[layer], block, index, part, total)

    def wanted(self, group: int, number: int, positions: range, prefixes: Sequence[int]) -> np.ndarray:
        """int32 [n, numbers]: what a group's layer of that number holds of tokens at `positions`."""
        heads = _heads_of(self._groups[group].specs[number], self._rank)
        found = np.zeros((len(positions), 2, len(heads), HEAD_DIM), np.int32)
        found[..., 0] = group + 1
        found[..., 1] = np.array(positions, np.int32)[:, None, None]
        found[..., 2] = np.array(prefixes, np.int32)[:, None, None]
        found[..., 3] = (number + 1) * 1000 + np.array([0, 100], np.int32)[:, None] + np.array(heads, np.int32)
        return found.reshape(len(positions), math.prod(found.shape[1:]))

    def found(self, group: int, number: int, blocks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """int32 [n, numbers]: what that layer holds at these places."""
        rows: np.ndarray = self._rows[self._groups[group].layers[number]][blocks, offsets]
        return rows.reshape(len(blocks), math.prod(rows.shape[1:]))

    def store(self, group: int, number: int, places: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> None:
        """Writes `rows` int32 [n, numbers] to the blocks and offsets that are `places`."""
        kept = self._rows[self._groups[group].layers[number]]
        kept[places] = rows.reshape(len(rows), *kept.shape[2:])

    def copy(self, one: BlockCopy) -> None:
        """Copies blocks of a group."""
        for layer in self._groups[one.group].layers:
            self._rows[layer][one.targets] = self._rows[layer][one.sources]

    def lose(self) -> None:
        """Others have the memory now, and write to it."""
        self.lost = True
        for rows in self._rows.values():
            rows[...] = BAD


def _block_format(spec: AnyKVSpec, block_size: int) -> BlockFormat:
    """How a block of a layer lies in memory; a state is one row of numbers."""
    if isinstance(spec, LatentKV):
        return BlockFormat((block_size, spec.dim), (0, 1), torch.float32, token_axis=0)
    if isinstance(spec, StateKV):
        return BlockFormat((1, spec.state_bytes // 4), (0, 1), torch.float32)
    return BlockFormat((2, block_size, spec.num_kv_heads, spec.head_dim), (0, 1, 2, 3), torch.float32, 1, 2, 1)


def _heads_of(spec: AnyKVSpec, rank: int) -> range:
    """The heads that a rank keeps; several keep the same where they are fewer, and all of latents."""
    if not isinstance(spec, FullKV | StateKV):
        return range(HEADS)
    count = spec.num_kv_heads if isinstance(spec, FullKV) else spec.state_bytes // (8 * HEAD_DIM)
    first = rank * count % HEADS
    return range(first, first + count)
