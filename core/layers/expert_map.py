"""Which slots hold the experts of each layer, in device memory whose addresses never change, and the slots' loads.

CUDA graphs and kernels hold the addresses; a new placement is written into them between steps. Knows no policy and no
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..interfaces.balancer import ExpertPlacement


class ExpertMap(NamedTuple):
    """One layer's part of an `ExpertMaps`, with E experts and P slots of all ranks.

    A token goes to the slot `slots_of[e, its index % num_replicas[e]]` of each expert e that it chose, and is counted
    there in `loads`. `slots_of` is int32 [E, P - E + 1], -1 behind the last replica, `num_replicas` int32 [E],
    `expert_of` int32 [P], `loads` int32 [P].
    """

    slots_of: Tensor
    num_replicas: Tensor
    expert_of: Tensor
    loads: Tensor


class ExpertMaps:
    """The maps of L layers, first as `placement` says. `stage` copies a host array to the device without waiting."""

    def __init__(
        self, placement: ExpertPlacement, num_experts: int, device: torch.device, stage: Callable[[np.ndarray], Tensor]
    ) -> None:
        self.num_layers, self.num_slots = placement.expert_of.shape
        self.num_experts, self.width = num_experts, self.num_slots - num_experts + 1
        self._stage = stage
        self._placement = ExpertPlacement(placement.expert_of.copy(), placement.replica_of.copy())

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(self.num_layers, *shape, dtype=dtype, device=device)

        self.slots_of = empty(num_experts, self.width)
        self.num_replicas, self.expert_of = empty(num_experts), empty(self.num_slots)
        self.loads = empty(self.num_slots)
        self._index = empty(self.num_slots, dtype=torch.int64)  # `expert_of` as scatters want it
        for layer in range(self.num_layers):
            self.write(layer, placement)

    @property
    def placement(self) -> ExpertPlacement:
        """What the maps say now, as arrays of their own."""
        return ExpertPlacement(self._placement.expert_of.copy(), self._placement.replica_of.copy())

    def __getitem__(self, layer: int) -> ExpertMap:
        """The views of one layer."""
        return ExpertMap(self.slots_of[layer], self.num_replicas[layer], self.expert_of[layer], self.loads[layer])

    def write(self, layer: int, placement: ExpertPlacement) -> None:
        """Makes the maps of a layer those of `placement`, for all work that is launched afterwards."""
        own = self._placement
        own.expert_of[layer], own.replica_of[layer] = placement.expert_of[layer], placement.replica_of[layer]
        row = ExpertPlacement(own.expert_of[layer][None], own.replica_of[layer][None])
        self.slots_of[layer].copy_(self._stage(row.slots_of(self.num_experts, self.width)[0]))
        self.num_replicas[layer].copy_(self._stage(row.num_replicas(self.num_experts)[0]))
        self.expert_of[layer].copy_(self._stage(row.expert_of[0]))
        self._index[layer].copy_(self.expert_of[layer])

    def take_loads(self, into: Tensor | None) -> None:
        """Adds the slots' loads to those of experts, `into` int64 [L, E], and sets them to zero; None: only sets."""
        if into is not None:
            into.scatter_add_(1, self._index, self.loads.to(torch.int64))
        self.loads.zero_()
