"""Rows that share a prefix, as attention reads them: tiles of rows in buffers that never move. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...interfaces.attention import SharedPrefix
from ...interfaces.step import PrefixRows
from ..device import Device

#: Tiles besides those that one group of all rows would fill: groups end in tiles that are not full.
SPARE_TILES = 3


class PrefixTiles:
    """One buffer of int32 for every size of a step, so that a captured step finds its own again."""

    def __init__(self, device: Device, max_rows: int, tile_rows: int = 16) -> None:
        self._tile_rows = tile_rows
        size = num_tiles(max_rows, tile_rows) * (tile_rows + 1) + max_rows
        self.memory = device.zeros(size, dtype=torch.int32)
        self._streams = device.streams
        self._written: np.ndarray | None = None

    def fill(self, groups: Sequence[PrefixRows], num_rows: int) -> SharedPrefix:
        """Puts the groups of a step of `num_rows` rows (padding included) there; no group at all is fine.

        Nothing is sent where the step before had the same. Groups beyond the last tile are left out.
        """
        size = self._tile_rows
        tiles = num_tiles(num_rows, size)
        packed = np.zeros(tiles * (size + 1) + num_rows, np.int32)
        rows, tile_lens, row_lens = np.split(packed, (tiles * size, tiles * (size + 1)))
        rows.fill(-1)
        tile = 0
        for group in sorted(groups, key=lambda one: len(one.rows) * one.num_tokens, reverse=True):
            count = len(group.rows)
            needed = -(-count // size)
            if tile + needed > tiles:
                break
            rows[tile * size : tile * size + count] = group.rows
            tile_lens[tile : tile + needed] = group.num_tokens
            row_lens[group.rows] = group.num_tokens
            tile += needed
        if self._written is None or not np.array_equal(packed, self._written):
            self.memory[: len(packed)].copy_(self._streams.stage(packed))
            self._written = packed
        parts: tuple[Tensor, ...] = self.memory[: len(packed)].split((tiles * size, tiles, num_rows))
        return SharedPrefix(parts[0].view(tiles, size), parts[1], parts[2])


def num_tiles(num_rows: int, tile_rows: int = 16) -> int:
    """Tiles of a step of `num_rows` rows."""
    return -(-num_rows // tile_rows) + SPARE_TILES
