import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from frame.core.ops import step

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6)


@given(ROWS, st.randoms(use_true_random=False))
def test_inputs_equal_brute_force(rows, draw):
    table = torch.from_numpy(np.arange(8 * 64, dtype=np.int32).reshape(8, 64))
    slots = draw.sample(range(8), len(rows))
    computed = torch.tensor([c for c, _ in rows], dtype=torch.int32)
    scheduled = torch.tensor([s for _, s in rows], dtype=torch.int32)
    total = int(scheduled.sum())
    ids, positions, start, lens = step.build_inputs(
        table, torch.tensor(slots, dtype=torch.int32), computed, scheduled, total
    )
    expected = [(slot, c + i) for slot, (c, s) in zip(slots, rows, strict=True) for i in range(s)]
    assert positions.tolist() == [position for _, position in expected]
    assert ids.tolist() == [int(table[slot, position]) for slot, position in expected]
    assert start.tolist() == [0, *np.cumsum(scheduled.numpy()).tolist()]
    assert lens.tolist() == [c + s for c, s in rows]

    blocks = torch.randperm(6 * 20).view(6, 20)[: len(rows)].int()
    mapping = step.slot_mapping(blocks, start, positions, 3)
    row_of = [row for row, (_, s) in enumerate(rows) for _ in range(s)]
    assert mapping.tolist() == [
        int(blocks[row, p // 3]) * 3 + p % 3 for row, p in zip(row_of, positions.tolist(), strict=True)
    ]
    assert len(set(mapping.tolist())) == total


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


def test_advance_skips_rows_without_a_token():
    table = torch.zeros(3, 5, dtype=torch.int32)
    step.advance(table, torch.tensor([2, 0]), torch.tensor([4, 1]), torch.tensor([9, -1]))
    assert table[2].tolist() == [0, 0, 0, 0, 9]
    assert not table[0].any()
