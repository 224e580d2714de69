import numpy as np
import torch
from hypothesis import given, strategies as st

from frame.core.ops import step

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6)


@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 3), st.integers(0, 2))
def test_inputs_equal_brute_force(rows, draw, more_tokens, more_rows):
    token_ids = torch.from_numpy(np.arange(8 * 64, dtype=np.int32).reshape(8, 64))
    tables = [torch.randperm(8 * 20).view(8, 20).int() for _ in range(2)]
    slots = draw.sample(range(8), len(rows))
    packed = torch.zeros(3, len(rows) + more_rows, dtype=torch.int32)
    packed[:, : len(rows)] = torch.tensor([slots, [c for c, _ in rows], [s for _, s in rows]])
    total = int(packed[2].sum())
    buffers = step.StepBuffers.allocate(64, 8, [20, 20], torch.device("cpu"))
    for buffer in (buffers.input_ids, buffers.positions, buffers.query_start[1:], buffers.seq_lens):
        buffer.fill_(-7)
    sizes_of_blocks = [3, 7]
    max_blocks = [max(-(-(c + s) // size) for c, s in rows) for size in sizes_of_blocks]
    sizes = step.StepSizes(total + more_tokens, max_blocks, sizes_of_blocks)
    step.build_inputs(buffers, token_ids, tables, packed, sizes)
    expected = [(slot, c + i) for slot, (c, s) in zip(slots, rows, strict=True) for i in range(s)]
    padding = [0] * more_tokens
    assert buffers.positions[: total + more_tokens].tolist() == [position for _, position in expected] + padding
    ids = [int(token_ids[slot, position]) for slot, position in expected]
    assert buffers.input_ids[: total + more_tokens].tolist() == ids + padding
    starts = [0, *np.cumsum([s for _, s in rows]).tolist()]
    assert buffers.query_start[: len(rows) + more_rows + 1].tolist() == starts + [total] * more_rows
    assert buffers.seq_lens[: len(rows) + more_rows].tolist() == [c + s for c, s in rows] + [0] * more_rows
    parts = zip(tables, buffers.tables, buffers.slot_mapping, max_blocks, sizes_of_blocks, strict=True)
    for table, own, mapping, width, size in parts:
        assert torch.equal(own[: len(rows), :width], table[slots, :width])
        found = mapping[: total + more_tokens].tolist()
        assert found[:total] == [int(table[slot, p // size]) * size + p % size for slot, p in expected]
        assert found[total:] == [-1] * more_tokens
        assert len(set(found[:total])) == total


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_one_scatter_equals_sequential_writes(writes):
    distinct = {slot: (slot, start, values) for slot, start, values in writes}
    table, expected = torch.zeros(4, 10, dtype=torch.int32), torch.zeros(4, 10, dtype=torch.int32)
    for slot, start, values in distinct.values():
        expected[slot, start : start + len(values)] = torch.tensor(values, dtype=torch.int32)
    runs = list(distinct.values())
    step.write_rows(
        table,
        torch.tensor([slot for slot, _, _ in runs]),
        torch.tensor([start for _, start, _ in runs]),
        torch.tensor([len(values) for _, _, values in runs]),
        torch.tensor([value for _, _, values in runs for value in values]),
    )
    assert torch.equal(table, expected)


def test_advance_skips_rows_without_a_token_and_padding():
    table = torch.zeros(3, 5, dtype=torch.int32)
    step.advance(table, torch.tensor([2, 0, 0]), torch.tensor([4, 1, 0]), torch.tensor([9, -1, 5]))
    assert table[2].tolist() == [0, 0, 0, 0, 9]
    assert not table[0].any()
