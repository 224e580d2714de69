"""The runner's kernels against their references: on a GPU, and under the interpreter through tests/kernels."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from frame.core.ops import step as reference
from frame.kernels import step as kernels

pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def filled(buffers: reference.StepBuffers) -> list[torch.Tensor]:
    every = [buffers.input_ids, buffers.positions, buffers.query_start[1:], buffers.seq_lens, *buffers.slot_mapping]
    for buffer in every:
        buffer.fill_(-7)
    return every


@pytest.mark.parametrize("exact", [True, False], ids=["as many blocks as needed", "a whole table"])
@pytest.mark.parametrize("more", [(0, 0), (5, 3)])
@pytest.mark.parametrize("rows", [[(0, 1)], [(3, 1), (40, 1), (7, 1)], [(0, 700), (9, 1), (64, 33), (0, 1)]])
def test_inputs(rows: list, more: tuple[int, int], exact: bool) -> None:
    draw = np.random.default_rng(0)
    token_ids = torch.from_numpy(draw.integers(0, 9999, (9, 1024), dtype=np.int32)).to(DEVICE)
    tables = [torch.from_numpy(draw.permutation(9 * 64).astype(np.int32).reshape(9, 64)).to(DEVICE) for _ in range(2)]
    slots = draw.permutation(9)[: len(rows)]
    packed = np.zeros((3, len(rows) + more[1]), np.int32)
    packed[:, : len(rows)] = slots, [c for c, _ in rows], [s for _, s in rows]
    total = int(packed[2].sum())
    sizes_of_blocks = [16, 1 << 30]  # the other is that of a group of states
    num_blocks = [-(-(packed[1] + packed[2]) // size) for size in sizes_of_blocks]
    widths = [int(count.max()) if exact else 64 for count in num_blocks]
    sizes = reference.StepSizes(total + more[0], widths, sizes_of_blocks)
    found, expected = (reference.StepBuffers.allocate(1024, 9, [64, 64], torch.device(DEVICE)) for _ in range(2))
    pairs = zip(filled(found), filled(expected), strict=True)
    kernels.build_inputs(found, token_ids, tables, torch.from_numpy(packed).to(DEVICE), sizes)
    reference.build_inputs(expected, token_ids, tables, torch.from_numpy(packed).to(DEVICE), sizes)
    for one, other in pairs:
        assert torch.equal(one, other)
    assert torch.equal(found.query_start, expected.query_start)
    for one, other, counts in zip(found.tables, expected.tables, num_blocks, strict=True):
        for row, count in enumerate(counts[: len(rows)]):
            assert torch.equal(one[row, :count], other[row, :count])


def test_staged_writes() -> None:
    table, expected = (torch.zeros((6, 900), dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots, starts, lengths = (
        torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([4, 0, 4], [3, 0, 800], [700, 1, 9])
    )
    values = torch.arange(1, 711, dtype=torch.int32, device=DEVICE)
    kernels.write_rows(table, slots, starts, lengths, values)
    reference.write_rows(expected, slots, starts, lengths, values)
    assert torch.equal(table, expected)
    kernels.write_rows(table, slots[:0], starts[:0], lengths[:0], values[:0])
    assert torch.equal(table, expected)


def test_advance() -> None:
    table, expected = (torch.zeros((200, 5), dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots = torch.randperm(200)[:150].int().to(DEVICE)
    slots[::7] = -1
    lengths = torch.randint(0, 5, (150,), dtype=torch.int32).to(DEVICE)
    sampled = torch.randint(-1, 50, (150,), dtype=torch.int32).to(DEVICE)
    kernels.advance(table, slots, lengths, sampled)
    reference.advance(expected, slots, lengths, sampled)
    assert torch.equal(table, expected)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_single_values(count: int) -> None:
    vector, expected = (torch.zeros(500, dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots, values = torch.randperm(500)[:count].int().to(DEVICE), torch.arange(1, count + 1).to(DEVICE)
    slots[::5] = -1
    kernels.write_values(vector, slots, values)
    reference.write_values(expected, slots, values)
    assert torch.equal(vector, expected)
