"""The contract of balancers of experts: whole placements, from their arguments alone, that even out a hot expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from frame.core.interfaces.balancer import ExpertBalancer, ExpertPlacement, SlotShape, balancedness

from .plugin_suite import PluginSuite

_LAYERS = 3
#: (experts, shape): with and without replicas, one rank, several nodes, groups that divide over nodes and that do not,
#: a slot for each rank, more replicas than experts.
_CASES = (
    (8, SlotShape(num_slots=8, num_ranks=1)),
    (8, SlotShape(num_slots=8, num_ranks=4)),
    (8, SlotShape(num_slots=12, num_ranks=4, num_nodes=2, num_groups=4, expert_bytes=1 << 20)),
    (12, SlotShape(num_slots=16, num_ranks=8, num_nodes=2, num_groups=3, expert_bytes=1 << 20)),
    (6, SlotShape(num_slots=9, num_ranks=9, num_nodes=3)),
    (4, SlotShape(num_slots=16, num_ranks=4, num_nodes=2, num_groups=2)),
)


class ExpertBalancerSuite(PluginSuite):
    """The contract of `frame.interfaces.ExpertBalancer`.

        class TestMine(ExpertBalancerSuite):
            plugin = "mine"            # or target = "package.module:Class"

    A balancer that never moves an expert fulfils it: how good a placement must be is not part of the contract.
    """

    kind = "balancer"

    def balancer(self) -> ExpertBalancer:
        """A new balancer."""
        made = self.make()
        assert isinstance(made, ExpertBalancer), f"{type(made).__name__} does not derive from ExpertBalancer"
        return made

    def cases(self) -> Iterator[tuple[np.ndarray, SlotShape, ExpertPlacement]]:
        """Loads of every kind for every shape, with the placement of a start and an uneven one."""
        draw = np.random.default_rng(0)
        for experts, shape in _CASES:
            one_hot = np.zeros((_LAYERS, experts), dtype=np.int64)
            one_hot[:, -1] = 1000
            zipf = (1000 / np.arange(1, experts + 1)).astype(np.int64)
            kinds = (
                np.zeros((_LAYERS, experts), dtype=np.int64),
                np.full((_LAYERS, experts), 7, dtype=np.int64),
                one_hot,
                np.stack([draw.permutation(zipf) for _ in range(_LAYERS)]),
                draw.integers(0, 1 << 40, (_LAYERS, experts)),
            )
            start = ExpertPlacement.initial(_LAYERS, experts, shape.num_slots)
            extra = draw.integers(0, experts, (_LAYERS, shape.num_slots - experts))
            every = np.concatenate([np.tile(np.arange(experts), (_LAYERS, 1)), extra], axis=1)
            for loads in kinds:
                yield loads, shape, start
                yield loads, shape, ExpertPlacement.of(draw.permuted(every, axis=1))

    def test_every_expert_gets_a_slot_and_every_slot_an_expert(self) -> None:
        for loads, shape, current in self.cases():
            found = self.balancer().place(loads, shape, current)
            assert isinstance(found, ExpertPlacement), f"place must give an ExpertPlacement, gave {found!r}"
            problems = found.problems(loads.shape[0], loads.shape[1], shape.num_slots)
            assert not problems, f"for {shape} and loads {loads.tolist()}: {'; '.join(problems)}"

    def test_placements_depend_on_the_arguments_alone(self) -> None:
        """A policy whose answers depended on the past could not be replayed."""
        kept = self.balancer()
        for loads, shape, current in self.cases():
            first = kept.place(loads, shape, current)
            for other in (kept, self.balancer()):
                again = other.place(loads.copy(), shape, current)
                same = np.array_equal(first.expert_of, again.expert_of)
                same = same and np.array_equal(first.replica_of, again.replica_of)
                assert same, f"equal arguments give two placements, for {shape} and loads {loads.tolist()}"

    def test_looking_changes_nothing(self) -> None:
        for loads, shape, current in self.cases():
            given = (loads, current.expert_of, current.replica_of)
            before = [values.copy() for values in given]
            found = self.balancer().place(loads, shape, current)
            names = ("loads", "the current expert_of", "the current replica_of")
            for name, values, old in zip(names, given, before, strict=True):
                assert np.array_equal(values, old), f"place changed {name}"
            if found is not current:
                shared = np.shares_memory(found.expert_of, current.expert_of)
                assert not shared, "a new placement shares memory with the current one"

    def test_placements_of_a_start_get_no_worse(self) -> None:
        """Where every rank may hold any expert, and replicas are there to spread a hot one."""
        experts, draw = 16, np.random.default_rng(1)
        shape = SlotShape(num_slots=24, num_ranks=4, expert_bytes=1 << 20)
        loads = np.stack([draw.permutation(10_000 // np.arange(1, experts + 1)) for _ in range(_LAYERS)])
        start = ExpertPlacement.initial(_LAYERS, experts, shape.num_slots)
        found = self.balancer().place(loads, shape, start)
        before, after = (balancedness(one.rank_loads(loads, shape.num_ranks)) for one in (start, found))
        assert after >= before, f"the mean load over the largest fell from {before:.3f} to {after:.3f}"
