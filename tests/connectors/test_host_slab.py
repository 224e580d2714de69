"""Host memory in rows: which bytes each has."""

from __future__ import annotations

import pytest
import torch

from frame.plugins.connectors.blocks import host_slab
from frame.plugins.connectors.blocks.host_slab import HostSlab


def slab_of(row_bytes, num_bytes):
    sizes = []

    def pinned(size):
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    return HostSlab(row_bytes, num_bytes, pinned), sizes


@pytest.mark.parametrize(
    ("row_bytes", "num_bytes", "sizes"),
    [
        (8, 100, [64, 32]),
        (24, 1000, [256, 256, 256, 128, 64, 32]),
        (256, 1024, [256] * 4),
        (300, 1500, [512, 512]),
        (300, 299, []),
    ],
)
def test_pieces_are_powers_of_two_and_no_more_than_is_asked_for(monkeypatch, row_bytes, num_bytes, sizes):
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 256)
    slab, taken = slab_of(row_bytes, num_bytes)
    assert taken == sizes
    assert slab.num_rows == sum(size // row_bytes for size in sizes)


def test_every_row_has_bytes_of_its_own(monkeypatch):
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 256)
    slab, _ = slab_of(24, 1000)
    for row in range(slab.num_rows):
        ((place, run),) = slab.runs([row])
        assert place == 0
        run.fill_(row)
    rows = [3, 4, 5, 9, 10, 11, 8, 8, 30, 31]
    found = list(slab.runs(rows))
    assert [place for place, _ in found] == [0, 3, 4, 6, 7, 8]
    assert torch.cat([run for _, run in found])[:, 0].tolist() == rows
    assert list(slab.runs([])) == []
