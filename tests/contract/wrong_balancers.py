"""Balancers of experts that are wrong in one way each."""

from __future__ import annotations

import itertools

import numpy as np

from frame.interfaces import ExpertBalancer, ExpertPlacement, SlotShape

_COUNT = itertools.count()


class Homeless(ExpertBalancer):
    """Fills the slots with the hottest experts only."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        hot = np.argsort(-loads, axis=1, kind="stable")[:, : max(1, loads.shape[1] - 1)]
        return ExpertPlacement.of(np.take(hot, np.arange(shape.num_slots) % hot.shape[1], axis=1))


class Miscounting(ExpertBalancer):
    """Calls every slot the first replica of its expert."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        return ExpertPlacement(current.expert_of.copy(), np.zeros_like(current.replica_of))


class Wandering(ExpertBalancer):
    """Turns the slots by one more at each call."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        return ExpertPlacement.of(np.roll(current.expert_of, next(_COUNT), axis=1))


class InPlace(ExpertBalancer):
    """Sorts the slots of the placement that it was given."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        current.expert_of.sort(axis=1)
        return ExpertPlacement.of(current.expert_of)


class Gathering(ExpertBalancer):
    """Puts the hottest experts next to each other."""

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        hot = np.argsort(-loads, axis=1, kind="stable")
        return ExpertPlacement.of(np.take(hot, np.minimum(np.arange(shape.num_slots), loads.shape[1] - 1), axis=1))
