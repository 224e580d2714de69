import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from frame.core.ops import Ops
from frame.core.ops.step import StepBuffers, StepSizes
from frame.plugins.platforms.cpu_ops import CpuOps

pytestmark = pytest.mark.product


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_inputs_equal_the_reference(rows, decode, more_tokens, more_rows):
    computed = [before for before, _ in rows]
    counts = [1 if decode else max(count, 1) for _, count in rows]
    packed = torch.zeros(3, len(rows) + more_rows, dtype=torch.int32)
    packed[:, : len(rows)] = torch.tensor([list(range(len(rows)))[::-1], computed, counts])
    token_ids = torch.from_numpy(np.arange(8 * 64, dtype=np.int32).reshape(8, 64))
    tables = [torch.randperm(8 * 20).view(8, 20).int() for _ in range(2)]
    sizes_of_blocks = [3, 7]
    lengths = [before + count for before, count in zip(computed, counts, strict=True)]
    max_blocks = [-(-max(lengths) // size) for size in sizes_of_blocks]
    total = sum(counts)
    sizes = StepSizes(total + more_tokens, max_blocks, sizes_of_blocks)
    buffers = [StepBuffers.allocate(64, 8, [20, 20], torch.device("cpu")) for _ in range(2)]
    for ops, into in zip((Ops, CpuOps()), buffers, strict=True):
        ops.build_inputs(into, token_ids, tables, packed, sizes)
    for name in ("input_ids", "positions", "query_start", "seq_lens"):
        assert torch.equal(getattr(buffers[0], name), getattr(buffers[1], name)), name
    for name in ("tables", "slot_mapping"):
        for one, other in zip(getattr(buffers[0], name), getattr(buffers[1], name), strict=True):
            assert torch.equal(one, other), name


def test_the_best_token_is_the_first_of_the_largest_and_nan_shows():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, float("nan"), 9.0], [float("-inf")] * 3])
    for got, want in zip(CpuOps().greedy(logits), Ops.greedy(logits), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_runs_of_several_lengths_are_written():
    for lengths in ([1, 1, 1], [2, 0, 3]):
        slots, starts = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0, 3, 1], dtype=torch.int32)
        values = torch.arange(sum(lengths), dtype=torch.int32) + 7
        tables = torch.zeros(2, 4, 8, dtype=torch.int32)
        for ops, table in zip((Ops, CpuOps), tables, strict=True):
            ops.write_rows(table, slots, starts, torch.tensor(lengths, dtype=torch.int32), values)
        assert torch.equal(tables[0], tables[1])


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]], ids=str)
@pytest.mark.parametrize("vocab", [1, 32, 45, 200])
def test_bitmasks_are_those_of_the_reference(rows, vocab):
    words = torch.randint(-(2**31), 2**31 - 1, (len(rows), -(-vocab // 32)), dtype=torch.int32)
    found = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    found[:, ::5], found[:, 1::7], found[:, 2::9], found[:, 3::8] = torch.nan, -torch.nan, torch.inf, -torch.inf
    expected = found.clone()
    CpuOps.apply_bitmask(found, torch.tensor(rows), words)
    Ops.apply_bitmask(expected, torch.tensor(rows), words)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_bitmasks_of_more_than_a_chunk_are_those_of_the_reference():
    words = torch.randint(-(2**31), 2**31 - 1, (9, 3000), dtype=torch.int32)
    found, expected = torch.randn(9, 95_999).expand(2, -1, -1).clone()
    CpuOps.apply_bitmask(found, torch.arange(9), words)
    Ops.apply_bitmask(expected, torch.arange(9), words)
    assert found.equal(expected)
