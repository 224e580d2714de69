"""Experts come to the slots that the map names: rows tagged by expert, moved by ranks that are threads over gloo."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from frame.core.layers.expert_map import ExpertMaps
from frame.expert_balance.balance import _POLL_STEPS, ExpertBalance, LoadWindow
from frame.expert_balance.moves import plan_moves
from frame.interfaces import (
    ExpertBalancer,
    ExpertPlacement,
    FixedPlacement,
    LoadTrace,
    LoadTraceWriter,
    Setup,
    SideQueue,
    SingleGroup,
    SlotShape,
    TraceHeader,
)
from frame.plugins.balancers.hierarchical import HierarchicalBalancer
from frame.plugins.platforms.cpu import CpuPlatform
from frame.testing import make_setup, run_ranks

LAYERS, EXPERTS, SLOTS, RANKS = 3, 6, 9, 3
SHAPE = SlotShape(num_slots=SLOTS, num_ranks=RANKS)
START = ExpertPlacement.initial(LAYERS, EXPERTS, SLOTS)
INTERVAL = 8


class Given(ExpertBalancer):
    """Answers with placements that were made before, one after the other, then with the current one."""

    def __init__(self, *placements):
        super().__init__(Setup())
        self.placements, self.seen = list(placements), []

    def place(self, loads, shape, current):
        self.seen.append(loads.copy())
        return self.placements.pop(0) if self.placements else current


def random_placement(seed):
    draw = np.random.default_rng(seed)
    rows = [[*range(EXPERTS), *draw.integers(0, EXPERTS, SLOTS - EXPERTS)] for _ in range(LAYERS)]
    return ExpertPlacement.of(draw.permuted(np.array(rows), axis=1))


def rows_of(layer, expert):
    """Three weights of an expert, of other types and shapes, that say which expert of which layer they are."""
    tag = 100 * layer + expert
    return [torch.full((2, 3), tag).float(), torch.full((5,), tag).to(torch.bfloat16), torch.tensor(tag)]


def weights_of(placement, rank):
    count = placement.expert_of.shape[1] // RANKS
    own = placement.expert_of[:, rank * count : (rank + 1) * count]
    tensors = [[rows_of(layer, expert) for expert in experts] for layer, experts in enumerate(own.tolist())]
    return [[torch.stack(parts) for parts in zip(*layer, strict=True)] for layer in tensors]


def maps(start=START, experts=EXPERTS):
    return ExpertMaps(start, experts, torch.device("cpu"), torch.from_numpy)


def streams():
    return CpuPlatform(make_setup("platform")).streams()


def make(group, balancer, rows, shape=SHAPE, made=None, **settings):
    settings = {"interval": INTERVAL, "window": 16, **settings}
    return ExpertBalance(made or maps(), rows, group, shape, balancer, streams(), **settings)


def settle(balance, most=400):
    """Steps until a decision has been made and carried out; the same number on every rank."""
    steps = 0
    while balance.is_idle and steps < most:
        balance.advance(dummy=False)
        steps += 1
    while not balance.is_idle and steps < most:
        if balance._placing is not False and hasattr(balance._placing, "join"):
            balance._placing.join()
        balance.advance(dummy=False)
        steps += 1
    assert steps < most
    return steps


def same(weights, wanted):
    return all(
        torch.equal(one, other)
        for layer, expected in zip(weights, wanted, strict=True)
        for one, other in zip(layer, expected, strict=True)
    )


@pytest.mark.parametrize(("rows_per_step", "beside"), [(1, False), (3, False), (1, True)])
def test_experts_lie_where_the_maps_say_after_every_move(rows_per_step, beside):
    goals = [random_placement(seed) for seed in range(3)]

    def work(group):
        weights = weights_of(START, group.rank)
        places = [[one.data_ptr() for one in layer] for layer in weights]
        queue = streams().side_queue() if beside else None
        balance = make(group, Given(*goals), weights, rows_per_step=rows_per_step, queue=queue)
        counts = []
        for goal in goals:
            counts.append(settle(balance))
            assert same(weights, weights_of(goal, group.rank))
            assert np.array_equal(balance._maps.expert_of.numpy(), goal.expert_of)
            assert np.array_equal(balance._maps.slots_of.numpy(), goal.slots_of(EXPERTS, SLOTS - EXPERTS + 1))
            assert np.array_equal(balance._maps.num_replicas.numpy(), goal.num_replicas(EXPERTS))
        assert places == [[one.data_ptr() for one in layer] for layer in weights]
        balance.close()
        return counts, balance.num_placements, balance.num_received

    results = run_ranks(RANKS, work, seconds=30)
    received, before = 0, START
    for goal in goals:
        received, before = received + int(goal.received(before, RANKS).sum()), goal
    assert sum(count for *_, count in results) == received
    assert {placements for _, placements, _ in results} == {3}


class LateQueue(SideQueue):
    """Does its work beside the steps, each time somewhat later."""

    def __init__(self, seed):
        self._queue, self._draw = streams().side_queue(), random.Random(seed)

    def run(self, work):
        seconds = self._draw.uniform(0, 0.01)
        self._queue.run(lambda: (time.sleep(seconds), work())[1])

    def join(self):
        self._queue.join()

    def close(self):
        self._queue.close()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("delays", [0.0, 0.004], ids=["", "random delays"])
def test_every_rank_commits_a_layer_in_the_same_step_and_weights_and_maps_together(beside, delays):
    """However late each rank is with its steps, with what runs beside them, and with the policy's answer."""
    goals = [random_placement(5), random_placement(6)]

    class Late(Given):
        def place(self, loads, shape, current):
            time.sleep(delays * 5)
            return super().place(loads, shape, current)

    def work(group):
        weights, draw = weights_of(START, group.rank), random.Random(group.rank)
        queue = (LateQueue(group.rank) if delays else streams().side_queue()) if beside else None
        balance = make(group, Late(*goals), weights, queue=queue)
        seen = []
        for _ in range(200):
            time.sleep(draw.uniform(0, delays))
            balance.advance(dummy=group.rank == 1)
            now = balance._maps.placement
            assert same(weights, weights_of(now, group.rank))
            seen.append(now.expert_of.tolist())
        balance.close()
        return seen

    first, *others = run_ranks(RANKS, work, seconds=30)
    assert all(other == first for other in others)
    changes = sum(one != other for one, other in pairwise(first))
    assert changes >= LAYERS


def test_unchanged_slots_are_never_written():
    goal = ExpertPlacement.of(START.expert_of.copy())
    goal.expert_of[1, [0, 8]] = goal.expert_of[1, [8, 0]]

    def work(group):
        weights = weights_of(START, group.rank)
        versions = []
        balance = make(group, Given(ExpertPlacement.of(goal.expert_of)), weights)
        balance._bytes = [
            [_Watched(one, versions, layer) for one in parts] for layer, parts in enumerate(balance._bytes)
        ]
        settle(balance)
        assert same(weights, weights_of(goal, group.rank))
        return sorted(set(versions))

    assert run_ranks(RANKS, work, seconds=30) == [[(1, 0)], [], [(1, 2)]]


class _Watched:
    """Rows of weights that note which are handed out to be written."""

    def __init__(self, rows, written, layer):
        self.rows, self.written, self.layer = rows, written, layer
        self.shape = rows.shape

    def __getitem__(self, slot):
        return _Row(self.rows[slot], lambda: self.written.append((self.layer, slot)))

    def new_empty(self, *shape):
        return self.rows.new_empty(*shape)


class _Row(torch.Tensor):
    @staticmethod
    def __new__(cls, row, note):
        made = row.as_subclass(cls)
        made.note = note
        return made

    def copy_(self, other):
        self.note()
        return super().copy_(other)

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_loads_are_those_of_experts_over_all_ranks_without_dummies():
    balancers = [Given() for _ in range(RANKS)]

    def work(group):
        made = maps()
        balance = make(group, balancers[group.rank], weights_of(START, group.rank), made=made)
        for step in range(INTERVAL):
            made.loads.fill_(1)
            balance.advance(dummy=step % 2 == 1)
        settle(balance)

    run_ranks(RANKS, work, seconds=30)
    (loads,) = balancers[0].seen
    assert loads.dtype == np.int64
    # Four steps that count, three ranks, a token in each of an expert's slots.
    assert (loads == 12 * START.num_replicas(EXPERTS)).all()
    assert balancers[1].seen == []


def test_the_window_forgets_its_oldest_part():
    made = maps()
    window = LoadWindow(made, 32)
    for step in range(80):
        made.loads.fill_(step)
        window.close_step(dummy=False)
        assert made.loads.abs().sum() == 0
    assert window.num_steps == 32
    assert window.total()[0, 5].item() == sum(range(48, 80))
    made.loads.fill_(7)
    window.close_step(dummy=True)
    assert window.total()[0, 5].item() == sum(range(48, 80))
    made.loads.fill_(7)
    window.close_step(dummy=False)
    assert window.num_steps == 31


def test_loads_before_a_move_stay_those_of_their_experts():
    made = maps()
    window = LoadWindow(made, 4)
    made.loads[0, 8] = 5
    window.close_step(dummy=False)
    made.write(0, random_placement(1))
    assert window.total()[0].tolist() == [0, 0, 5, 0, 0, 0]


def test_what_fails_beside_the_steps_is_raised_when_it_is_needed():
    side = streams().side_queue()
    side.run(lambda: None)
    side.join()

    def fail():
        raise ValueError("no way")

    side.run(fail)
    with pytest.raises(ValueError, match="no way"):
        side.join()
    side.close()


class Failing(ExpertBalancer):
    def place(self, loads, shape, current):
        raise RuntimeError("too hot")


class Nonsense(ExpertBalancer):
    def place(self, loads, shape, current):
        return ExpertPlacement(np.zeros_like(current.expert_of), current.replica_of)


@pytest.mark.parametrize(
    ("balancer", "said"), [(Failing, "too hot"), (Nonsense, "expert 1 of layer 0 has no slot"), (FixedPlacement, "")]
)
def test_a_balancer_that_fails_changes_nothing_and_is_asked_again(balancer, said, caplog):
    def work(group):
        weights = weights_of(START, group.rank)
        balance = make(group, balancer(Setup()), weights)
        for _ in range(2):
            settle(balance)
        assert same(weights, weights_of(START, group.rank))
        assert np.array_equal(balance._maps.expert_of.numpy(), START.expert_of)
        return balance.num_placements

    assert run_ranks(RANKS, work, seconds=30) == [0, 0, 0]
    assert caplog.text.count("the expert balancer failed") == (2 if said else 0)
    assert said in caplog.text


def test_steps_go_on_while_the_policy_thinks():
    thought = threading.Event()

    class Slow(ExpertBalancer):
        def place(self, loads, shape, current):
            assert thought.wait(60)
            return random_placement(2)

    weights = [[torch.arange(4.0)[:, None]]]
    start = ExpertPlacement.initial(1, 4, 4)
    balance = make(SingleGroup(), Slow(Setup()), weights, SlotShape(num_slots=4, num_ranks=1), maps(start, 4))
    for _ in range(INTERVAL + 3 * _POLL_STEPS):
        balance.advance(dummy=False)
    assert not balance.is_idle
    thought.set()
    settle(balance)


def test_a_hot_expert_is_spread():
    def work(group):
        made = maps()
        weights = weights_of(START, group.rank)
        balance = make(group, HierarchicalBalancer(Setup()), weights, made=made)
        for _ in range(INTERVAL):
            made.loads.fill_(1)
            made.loads[:, 5] = 50
            balance.advance(dummy=False)
        settle(balance)
        assert same(weights, weights_of(balance._maps.placement, group.rank))
        return made.num_replicas[:, 5].tolist(), round(balance.balancedness, 2)

    replicas, balance = run_ranks(RANKS, work, seconds=30)[0]
    assert min(replicas) >= 3
    assert balance < 0.5


def test_every_interval_is_recorded_by_rank_0(tmp_path):
    path = tmp_path / "loads.jsonl"
    record = LoadTraceWriter(path, TraceHeader(num_layers=LAYERS, num_experts=EXPERTS))

    def work(group):
        made = maps()
        balance = make(
            group, FixedPlacement(Setup()), weights_of(START, group.rank), made=made,
            record=record if group.rank == 0 else None,
        )  # fmt: skip
        for _ in range(2):
            made.loads.fill_(2)
            settle(balance)

    run_ranks(RANKS, work, seconds=30)
    record.close()
    first, second = LoadTrace(path)
    assert first.loads[0].tolist() == (6 * START.num_replicas(EXPERTS)[0]).tolist()
    assert (first.step, first.num_steps) == (INTERVAL, INTERVAL)
    assert second.step > first.step
    assert json.loads(path.read_text().splitlines()[0])["num_experts"] == EXPERTS


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([[torch.zeros(3, 4).T]], {}, r"weights \[4, 3\] with strides .* layer 0 cannot be moved"),
        ([[torch.zeros(3, 2)], [torch.zeros(3, 1)]], {}, "cannot share a buffer"),
        ([[torch.zeros(3, 2)]] * 2, {}, "experts of 2 layers"),
        ([[torch.zeros(3, 2)]] * 3, {"interval": 0}, "must be at least 1"),
        (
            [[torch.zeros(3, 2)]] * 3,
            {"shape": SlotShape(num_slots=9, num_ranks=2)},
            "9 slots do not divide over 2 ranks",
        ),
    ],
)
def test_weights_that_cannot_be_moved_are_refused(rows, settings, said):
    with pytest.raises(ValueError, match=said):
        make(SingleGroup(), FixedPlacement(Setup()), rows, **settings)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 3))
def test_plans_of_all_ranks_fit_together(first, second, most_rows):
    before, after = random_placement(first).expert_of[0], random_placement(second).expert_of[0]
    plans = [plan_moves(before, after, SHAPE, rank, most_rows) for rank in range(RANKS)]
    assert all(plan.rounds == plans[0].rounds for plan in plans)
    old = before.reshape(RANKS, -1)
    for rank, plan in enumerate(plans):
        came = [one.expert for one in sum(plan.rounds, ()) if one.receiver == rank]
        assert len(came) == len(set(came))
        assert {expert for _, expert in plan.fills} == set(came) | set(plan.kept)
        assert not set(came) & set(old[rank])
    for transfers in plans[0].rounds:
        for rank in range(RANKS):
            assert sum(one.sender == rank for one in transfers) <= most_rows
            assert sum(one.receiver == rank for one in transfers) <= most_rows
            assert all(one.expert in old[one.sender] for one in transfers)
