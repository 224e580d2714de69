"""Groups of rows as tiles in one buffer: at the same place for every step of a size, sent only when they change."""

from __future__ import annotations

import numpy as np
import torch

from frame.core.interfaces.step import PrefixRows
from frame.core.ops import Ops
from frame.core.worker.device import Device
from frame.core.worker.step.prefix_tiles import PrefixTiles, num_tiles
from frame.plugins.platforms.cpu import HostStreams


class CountedStreams(HostStreams):
    staged = 0

    def stage(self, array: np.ndarray) -> torch.Tensor:
        self.staged += 1
        return super().stage(array)


def tiles_of(max_rows: int, streams: HostStreams | None = None, tile_rows: int = 16) -> PrefixTiles:
    return PrefixTiles(Device(Ops(), streams or HostStreams(), torch.device("cpu")), max_rows, tile_rows)


def group(rows: range, num_tokens: int) -> PrefixRows:
    return PrefixRows(rows=np.array(rows, np.int32), num_tokens=num_tokens)


def test_rows_fill_tiles_and_what_is_left_is_empty() -> None:
    tiles = tiles_of(64)
    found = tiles.fill([group(range(40, 42), 100), group(range(3, 23), 64)], 48)
    assert found.tile_rows.shape == (6, 16)
    assert found.tile_rows[0].tolist() == list(range(3, 19))
    assert found.tile_rows[1].tolist() == [19, 20, 21, 22] + [-1] * 12
    assert found.tile_rows[2].tolist() == [40, 41] + [-1] * 14
    assert found.tile_lens.tolist() == [64, 64, 100, 0, 0, 0]
    want = [0] * 48
    want[3:23], want[40:42] = [64] * 20, [100] * 2
    assert found.row_lens.tolist() == want


def test_a_size_keeps_its_place_and_equal_steps_send_nothing() -> None:
    streams = CountedStreams()
    tiles = tiles_of(64, streams)
    first = tiles.fill([group(range(4), 32)], 8)
    again = tiles.fill([group(range(4), 32)], 8)
    assert streams.staged == 1
    tiles.fill([group(range(5), 32)], 9)
    last = tiles.fill([], 8)
    assert streams.staged == 3
    for one, other in ((first, again), (first, last)):
        assert one.tile_rows.data_ptr() == other.tile_rows.data_ptr()
        assert one.row_lens.data_ptr() == other.row_lens.data_ptr()
    assert not last.tile_lens.any()
    assert not last.row_lens.any()


def test_more_groups_than_tiles_leave_those_out_that_save_least() -> None:
    tiles = tiles_of(16)
    found = tiles.fill([group(range(2 * i, 2 * i + 2), 16 * (i + 1)) for i in range(8)], 16)
    assert num_tiles(16) == 4
    assert found.tile_lens.tolist() == [128, 112, 96, 80]
    assert found.row_lens.tolist() == [0] * 8 + [80, 80, 96, 96, 112, 112, 128, 128]


def test_tiles_have_the_rows_that_a_backend_takes() -> None:
    tiles = tiles_of(16, tile_rows=4)
    prefix = tiles.fill([PrefixRows(rows=np.arange(6, dtype=np.int32), num_tokens=32)], 8)
    assert prefix.tile_rows.shape == (num_tiles(8, 4), 4)
    assert prefix.tile_rows[:2].tolist() == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert prefix.tile_lens.tolist() == [32, 32, 0, 0, 0]
