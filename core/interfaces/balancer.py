"""Where the experts of a model with expert parallelism lie, and the plugins that decide it by their load.

All ranks have equally many expert slots in each layer, and a slot holds the weights of one expert. There are at least
as many slots as experts; further ones hold replicas, among which the tokens of an expert are divided. Knows no weights
and no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .setup import Setup


@dataclass(frozen=True, kw_only=True)
class SlotShape:
    """The expert slots of a layer, the same in every layer: slot s lies on rank s // (num_slots // num_ranks).

    Ranks of a node follow each other. `num_groups` is the number of groups of neighbouring experts of which a router
    chooses a few for a token; 1 where it chooses among all. `expert_bytes` are the weights of one expert in one layer.
    """

    num_slots: int
    num_ranks: int
    num_nodes: int = 1
    num_groups: int = 1
    expert_bytes: int = 0

    @property
    def slots_per_rank(self) -> int:
        """Slots that each rank has in a layer."""
        return self.num_slots // self.num_ranks

    def problems(self, num_experts: int) -> list[str]:
        """Why experts cannot be placed into these slots, one sentence each; none where they can."""
        slots, ranks, nodes, groups = self.num_slots, self.num_ranks, self.num_nodes, self.num_groups
        if min(slots, ranks, nodes, groups, num_experts) < 1:
            return [
                f"slots {slots}, ranks {ranks}, nodes {nodes}, groups {groups}, experts {num_experts}: all must be ≥ 1"
            ]
        found = []
        if slots < num_experts:
            found.append(f"{slots} slots are fewer than {num_experts} experts")
        if slots % ranks:
            near = -(-slots // ranks) * ranks
            found.append(f"{slots} slots do not divide over {ranks} ranks; {near} would")
        if ranks % nodes:
            found.append(f"{ranks} ranks do not divide over {nodes} nodes")
        if num_experts % groups:
            found.append(f"{num_experts} experts do not divide into {groups} groups")
        return found


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Which expert each slot of each layer holds: `expert_of` int32 [L, P], and `replica_of` int32 [L, P].

    The n slots of an expert are its replicas 0 to n - 1; `replica_of` says which one a slot holds.
    """

    expert_of: np.ndarray
    replica_of: np.ndarray

    @classmethod
    def initial(cls, num_layers: int, num_experts: int, num_slots: int) -> ExpertPlacement:
        """Slot s holds expert s modulo `num_experts`, in every layer."""
        slots = np.tile(np.arange(num_slots, dtype=np.int32), (num_layers, 1))
        return cls(slots % np.int32(num_experts), slots // np.int32(num_experts))

    @classmethod
    def of(cls, expert_of: np.ndarray) -> ExpertPlacement:
        """Counts the replicas of every expert from the first slot to the last."""
        expert_of = np.ascontiguousarray(expert_of, dtype=np.int32)
        order = np.argsort(expert_of, axis=1, kind="stable")
        ordered = np.take_along_axis(expert_of, order, 1)
        places = np.broadcast_to(np.arange(ordered.shape[1]), ordered.shape)
        begins = np.ones(ordered.shape, dtype=bool)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        replica_of = np.empty_like(expert_of)
        np.put_along_axis(replica_of, order, (places - first).astype(np.int32), 1)
        return cls(expert_of, replica_of)

    def num_replicas(self, num_experts: int) -> np.ndarray:
        """How many slots hold each expert, int32 [L, E]."""
        layers = self.expert_of.shape[0]
        flat = self.expert_of.astype(np.int64) + np.arange(layers)[:, None] * num_experts
        return np.bincount(flat.ravel(), minlength=layers * num_experts).reshape(layers, -1).astype(np.int32)

    def slots_of(self, num_experts: int, width: int) -> np.ndarray:
        """The slots of each expert in order of replica, int32 [L, E, width], -1 behind the last.

        `width` must be at least the most replicas, which are never above num_slots - num_experts + 1.
        """
        layers, slots = self.expert_of.shape
        found = np.full((layers, num_experts, width), -1, dtype=np.int32)
        found[np.arange(layers)[:, None], self.expert_of, self.replica_of] = np.arange(slots, dtype=np.int32)
        return found

    def problems(self, num_layers: int, num_experts: int, num_slots: int) -> list[str]:
        """Why this is no placement of these experts, one sentence each; none where it is one."""
        shape = (num_layers, num_slots)
        for name, values in (("expert_of", self.expert_of), ("replica_of", self.replica_of)):
            if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.shape != shape:
                got = (
                    f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else type(values).__name__
                )
                return [f"{name} must be int32 {list(shape)}, is {got}"]
        if self.expert_of.min() < 0 or self.expert_of.max() >= num_experts:
            wrong = self.expert_of[(self.expert_of < 0) | (self.expert_of >= num_experts)][0]
            return [f"expert_of names expert {wrong}, experts are 0 to {num_experts - 1}"]
        counts = self.num_replicas(num_experts)
        if not counts.all():
            layer, expert = np.argwhere(counts == 0)[0]
            return [f"expert {expert} of layer {layer} has no slot"]
        high = np.take_along_axis(counts, self.expert_of, 1)
        outside = (self.replica_of < 0) | (self.replica_of >= high)
        if not outside.any():
            slots = self.slots_of(num_experts, int(counts.max()))
            outside = slots[np.arange(num_layers)[:, None], self.expert_of, self.replica_of] != np.arange(num_slots)
        if outside.any():
            layer, slot = np.argwhere(outside)[0]
            expert = self.expert_of[layer, slot]
            return [
                f"the replicas of expert {expert} in layer {layer} are not 0 to {counts[layer, expert] - 1}, once each"
            ]
        return []

    def rank_loads(self, loads: np.ndarray, num_ranks: int) -> np.ndarray:
        """Tokens of each rank, float64 [L, R], for tokens `loads` [L, E], of which every replica gets equally many."""
        layers = self.expert_of.shape[0]
        each = loads / self.num_replicas(loads.shape[1])
        sums: np.ndarray = np.take_along_axis(each, self.expert_of, 1).reshape(layers, num_ranks, -1).sum(2)
        return sums

    def received(self, before: ExpertPlacement, num_ranks: int) -> np.ndarray:
        """The slots whose weights must come from another rank where `before` is what ranks hold, bool [L, P].

        An expert that a rank gets for several slots comes once, for the first of them.
        """
        layers, slots = self.expert_of.shape
        per_rank = slots // num_ranks
        new = self.expert_of.reshape(layers, num_ranks, per_rank)
        old = before.expert_of.reshape(layers, num_ranks, per_rank)
        held = (new[..., :, None] == old[..., None, :]).any(-1)
        earlier = np.tril(np.ones((per_rank, per_rank), dtype=bool), -1)
        again = ((new[..., :, None] == new[..., None, :]) & earlier).any(-1)
        fetched: np.ndarray = ~(held | again).reshape(layers, slots)
        return fetched


def balancedness(rank_loads: np.ndarray) -> float:
    """The mean tokens of a rank over those of the fullest, of loads [L, R] summed over layers; 1.0 without tokens.

    Every layer waits for its fullest rank, so the sums are taken of each layer's mean and of each layer's largest.
    """
    most = float(rank_loads.max(1).sum())
    return float(rank_loads.mean(1).sum()) / most if most > 0 else 1.0


class ExpertBalancer(ABC):
    """Decides which slots hold which experts. Built as `Class(setup, options)`.

    Its answers must depend on their arguments and on the options alone, and it must not change its arguments.
    """

    def __init__(self, setup: Setup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        """The placement for tokens `loads` int64 [L, E] like those of the last steps; may be `current` itself.

        Called on one rank between steps, every few hundred or thousand of them. What it raises changes nothing: the
        current placement stays.
        """


class FixedPlacement(ExpertBalancer):
    """Moves no expert."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        del loads, shape
        return current
