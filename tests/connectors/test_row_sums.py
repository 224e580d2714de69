"""Checksums of rows: of all lengths and devices' ways, whether a row is summed at once or in pieces."""

from __future__ import annotations

import random

import pytest
import torch

from frame.plugins.connectors.offload import row_sums
from frame.plugins.connectors.offload.row_sums import RowSums

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [8, 12, 30, 31, 64, 200, 1000, 1001])
def test_a_row_that_is_summed_in_pieces_has_a_sum_of_its_own(monkeypatch, size):
    """Whatever is changed, or changes places, even with the same place of another piece."""
    monkeypatch.setattr(row_sums, "PIECE_BYTES", 64)
    sums, draw = RowSums(size, CPU), random.Random(size)
    rows = torch.randint(0, 256, (3, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    found = sums(rows)
    assert found.dtype is torch.int64
    assert [int(sums(row.view(1, -1))) for row in rows] == found.tolist()
    for _ in range(50):
        changed = rows[:1].clone()
        place = draw.randrange(size)
        changed[0, place] ^= 1 << draw.randrange(8)
        assert int(sums(changed)) != int(found[0])
    if size >= 128:
        swapped = rows[:1].clone()
        swapped[0, :8], swapped[0, 64:72] = rows[0, 64:72], rows[0, :8]
        assert int(sums(swapped)) != int(found[0])


def test_a_row_of_one_piece_has_the_sum_that_it_had(monkeypatch):
    """What an engine of an earlier version left is still sound; on devices it is multiplied in another way."""
    row = torch.arange(64, dtype=torch.uint8).view(1, -1)
    sums = RowSums(64, CPU)
    words = row.view(torch.int64)
    assert int(sums(row)) == int((words * sums._weights).sum())
    monkeypatch.setattr(row_sums, "PIECE_BYTES", 64)
    assert int(RowSums(64, CPU)(row)) == int(sums(row))
