from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from frame.interfaces import ExpertPlacement, Setup, SlotShape, balancedness
from frame.plugins.balancers.hierarchical import HierarchicalBalancer

#: Published with the algorithm: loads [2, 12], 16 slots, 8 ranks, 2 nodes.
LOADS = np.array([
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
])  # fmt: skip
GOLDEN = {
    4: (
        [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]],
        [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]],
    ),
    3: (
        [[10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1], [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7]],
        [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1]],
    ),
}
SLOTS_OF = [
    [[12], [15, 13], [11], [6], [7, 5], [0, 2], [1], [3], [4], [9], [8, 10], [14]],
    [[13], [15, 11], [8], [14], [9], [10, 12], [2, 4], [0], [6, 3], [7], [1], [5]],
]


def place(loads, **shape):
    shape = SlotShape(**shape)
    start = ExpertPlacement.initial(len(loads), loads.shape[1], shape.num_slots)
    return HierarchicalBalancer(Setup()).place(loads, shape, start)


def golden(groups):
    return place(LOADS, num_slots=16, num_ranks=8, num_nodes=2, num_groups=groups)


@pytest.mark.parametrize("groups", [4, 3])
def test_placements_equal_the_published_ones(groups):
    experts, counts = GOLDEN[groups]
    found = golden(groups)
    assert found.expert_of.tolist() == experts
    assert found.num_replicas(12).tolist() == counts


def test_replicas_are_listed_in_the_published_order():
    padded = [[slots + [-1] * (5 - len(slots)) for slots in layer] for layer in SLOTS_OF]
    assert golden(4).slots_of(12, 5).tolist() == padded


def zipf(seed=None, layers=8):
    draw = np.random.default_rng(seed)
    loads = (1_000_000 / np.arange(1, 257)).astype(np.int64)
    return np.stack([loads if seed is None else draw.permutation(loads) for _ in range(layers)])


def balance(placement, loads):
    """Of each layer by itself."""
    return [balancedness(rows[None]) for rows in placement.rank_loads(loads, 32)]


@pytest.mark.parametrize(("slots", "least", "most"), [(288, 0.992, 1.0), (256, 0.18, 0.20)], ids=["replicas", "none"])
def test_balance_where_every_rank_may_hold_any_expert(slots, least, most):
    loads = zipf(seed=0)
    found = balance(place(loads, num_ranks=32, num_slots=slots), loads)
    assert least <= min(found) <= max(found) <= most


def test_balance_with_groups_on_nodes():
    """It depends on how the groups of a layer fit onto the nodes, so the median of many layers is compared."""
    loads = zipf(seed=0, layers=60)
    found = balance(place(loads, num_ranks=32, num_slots=288, num_groups=8, num_nodes=4), loads)
    assert 0.70 <= np.median(found) <= 0.77


def test_balance_of_sorted_loads_with_groups_on_nodes():
    loads = zipf(layers=1)
    (found,) = balance(place(loads, num_ranks=32, num_slots=288, num_groups=8, num_nodes=4), loads)
    assert found == pytest.approx(0.36, abs=0.01)


def test_the_start_is_as_uneven_as_measured():
    """The median, since some layers have a replica of their hottest expert by chance."""
    loads = zipf(seed=0, layers=60)
    assert 0.17 <= np.median(balance(ExpertPlacement.initial(60, 256, 288), loads)) <= 0.21


@st.composite
def cases(draw):
    nodes = draw(st.integers(1, 3))
    ranks = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, nodes, 2 * nodes, 5]))
    experts = groups * draw(st.integers(1, 5))
    least = -(-experts // ranks)
    slots = ranks * draw(st.integers(least, least + 3))
    layers = draw(st.integers(1, 3))
    row = st.lists(st.sampled_from([0, 1, 1, 2, 7, 10**6]), min_size=experts, max_size=experts)
    loads = draw(st.lists(row, min_size=layers, max_size=layers))
    shape = SlotShape(num_slots=slots, num_ranks=ranks, num_nodes=nodes, num_groups=groups)
    return np.array(loads, dtype=np.int64), shape


@settings(deadline=None, max_examples=150)
@given(cases())
def test_maps_are_whole_and_inverse_of_each_other(case):
    loads, shape = case
    layers, experts = loads.shape
    start = ExpertPlacement.initial(layers, experts, shape.num_slots)
    found = HierarchicalBalancer(Setup()).place(loads, shape, start)
    assert found.problems(layers, experts, shape.num_slots) == []
    counts = found.num_replicas(experts)
    assert counts.min() >= 1
    assert (counts.sum(1) == shape.num_slots).all()
    slots = found.slots_of(experts, shape.num_slots - experts + 1)
    assert ((slots >= 0).sum(2) == counts).all()
    for layer in range(layers):
        for expert in range(experts):
            own = slots[layer, expert, : counts[layer, expert]]
            assert (found.expert_of[layer, own] == expert).all()
            assert found.replica_of[layer, own].tolist() == list(range(len(own)))


@settings(deadline=None, max_examples=50)
@given(cases())
def test_a_layer_is_placed_as_if_it_were_alone(case):
    loads, shape = case
    start = ExpertPlacement.initial(1, loads.shape[1], shape.num_slots)
    balancer = HierarchicalBalancer(Setup())
    whole = balancer.place(loads, shape, start)
    alone = [balancer.place(row[None], shape, start).expert_of[0].tolist() for row in loads]
    assert whole.expert_of.tolist() == alone


def test_equal_loads_are_placed_by_index():
    found = place(np.full((1, 6), 3), num_slots=8, num_ranks=4)
    assert found.num_replicas(6).tolist() == [[2, 2, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ({"num_slots": 12, "num_ranks": 5}, "12 slots do not divide over 5 ranks; 15 would"),
        ({"num_slots": 8, "num_ranks": 4}, "8 slots are fewer than 12 experts"),
        ({"num_slots": 12, "num_ranks": 4, "num_nodes": 3}, "4 ranks do not divide over 3 nodes"),
        ({"num_slots": 12, "num_ranks": 4, "num_groups": 5}, "12 experts do not divide into 5 groups"),
        ({"num_slots": 12, "num_ranks": 0}, "all must be ≥ 1"),
    ],
)
def test_shapes_that_cannot_be_filled_are_refused(shape, said):
    with pytest.raises(ValueError, match=said):
        place(LOADS, **shape)


def test_the_largest_models_are_placed_in_seconds():
    loads = np.random.default_rng(0).zipf(1.5, (61, 256)).clip(max=10**6)
    before = time.process_time()
    found = place(loads, num_slots=640, num_ranks=320, num_nodes=40, num_groups=8)
    assert time.process_time() - before < 10
    assert found.problems(61, 256, 640) == []
