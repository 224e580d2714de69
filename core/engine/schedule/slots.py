"""Stable slots of the worker: handed out lowest first, and again only when no launched step names them any more."""

from __future__ import annotations

import heapq

import numpy as np


class Slots:
    """Slots 0 .. num_slots - 1: free, in use, or retired (left by their request, but unanswered steps name them)."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._unanswered = np.zeros(num_slots, np.int32)  # launched steps that name each slot
        self._turn_of = np.zeros(num_slots, np.int64)  # the newest turn of each slot
        self._num_turns = 0
        self._retired: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot; raises `IndexError` when there is none."""
        return heapq.heappop(self._free)

    def unanswered(self, slot: int) -> int:
        """Launched steps that name `slot` and have not been answered."""
        return int(self._unanswered[slot])

    def next_turn(self, slots: np.ndarray, most: int) -> np.ndarray:
        """At most `most` of `slots`, in their order, whose turn was longest ago; none that two launched steps name."""
        slots = slots[self._unanswered[slots] < 2]
        chosen: np.ndarray = slots[np.sort(np.argsort(self._turn_of[slots], kind="stable")[:most])]
        self._num_turns += 1
        self._turn_of[chosen] = self._num_turns
        return chosen

    def launch(self, slots: np.ndarray) -> None:
        """Notes that a step was launched which names these distinct slots."""
        self._unanswered[slots] += 1

    def answer(self, slots: np.ndarray) -> list[int]:
        """Notes that a step with these slots was answered or failed; returns the retired slots that became free."""
        self._unanswered[slots] -= 1
        if not self._retired:
            return []
        freed = sorted(slot for slot in self._retired if self._unanswered[slot] == 0)
        for slot in freed:
            self._retired.remove(slot)
            heapq.heappush(self._free, slot)
        return freed

    def retire(self, slot: int) -> bool:
        """Gives back a slot; True when it is free at once, False when a later `answer` returns it."""
        if self._unanswered[slot] == 0:
            heapq.heappush(self._free, slot)
            return True
        self._retired.add(slot)
        return False
