"""Which running requests begin with the same blocks.

Requests share a prefix when one was admitted with cached blocks that another holds. So block tables are compared at
admission only, never in a step. Knows slots and block tables: no hash, no pool, and not whether a device reads shared
prefixes once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...interfaces.step import PrefixCosts, PrefixRows

Tables = Sequence[Sequence[int]]


@dataclass
class _Family:
    """Requests whose tables begin with one block; `common` is how many tokens each shares with the leader, at least."""

    leader: int
    tables: Tables
    common: dict[int, int] = field(default_factory=dict)  # by slot, the leader's not counted


class SharedPrefixes:
    """Called when a request takes or leaves a slot, and for each step that is launched.

    Rows are reported as a group when `costs` say that reading their prefix once saves tokens, and when all groups of a
    step together save what the launch costs; without costs none is. `groups` are the KV groups that keep whole
    prefixes, and their block sizes. Shared tokens are counted in multiples of `grain`.
    """

    def __init__(
        self, num_slots: int, costs: PrefixCosts | None = None, groups: Mapping[int, int] | None = None, grain: int = 1
    ) -> None:
        self.groups = groups or {}
        self._grain = grain
        self._costs = costs or PrefixCosts(launch=math.inf)
        self._families: dict[int, _Family] = {}
        self._tables: dict[int, tuple[int, Tables]] = {}  # by slot: the first block, by which families are found
        self._groups: list[tuple[np.ndarray, int]] | None = []  # None: to be computed anew
        self._row_of_slot = np.full(num_slots, -1, np.int32)

    def enter(self, slot: int, tables: Tables) -> None:
        """A request with the tables of the KV groups that keep whole prefixes takes `slot`; they may grow later."""
        if not tables or not tables[0]:
            return
        first = tables[0][0]
        self._tables[slot] = first, tables
        family = self._families.get(first)
        if family is None:
            self._families[first] = _Family(slot, tables)
        else:
            equal = map(_num_equal, tables, family.tables, self.groups.values())
            family.common[slot] = min(equal) // self._grain * self._grain
            self._groups = None

    def leave(self, slot: int) -> None:
        """The request of `slot` left it, for good or for the queue."""
        if slot not in self._tables:
            return
        first, _ = self._tables.pop(slot)
        family = self._families[first]
        self._groups = None
        if family.leader != slot:
            del family.common[slot]
        elif not family.common:
            del self._families[first]
        else:
            # what two share with the old leader they share with each other
            leader = max(family.common, key=family.common.__getitem__)
            most = family.common.pop(leader)
            family.leader, family.tables = leader, self._tables[leader][1]
            family.common = {other: min(count, most) for other, count in family.common.items()}

    def rows(self, slots: np.ndarray, num_scheduled: np.ndarray, num_computed: np.ndarray) -> list[PrefixRows]:
        """The groups of a step's rows that decode one token each, all of the shared tokens being computed."""
        if self._groups is None:
            found = (self._group(family) for family in self._families.values() if family.common)
            self._groups = [group for group in found if group is not None]
        if not self._groups:
            return []
        made, saved, row_of_slot = [], 0.0, self._row_of_slot
        row_of_slot[slots] = np.arange(len(slots), dtype=np.int32)
        for members, num_tokens in self._groups:
            rows = row_of_slot[members]
            rows = rows[rows >= 0]
            rows = rows[(num_scheduled[rows] == 1) & (num_computed[rows] >= num_tokens)]
            if len(rows) > 1 and (tokens := self._costs.saved(len(rows), num_tokens)) > 0:
                made.append(PrefixRows(rows=rows, num_tokens=num_tokens))
                saved += tokens
        row_of_slot[slots] = -1
        return made if saved >= self._costs.launch else []

    def _group(self, family: _Family) -> tuple[np.ndarray, int] | None:
        """(slots, tokens) of the members for which sharing saves most; None where it saves nothing."""
        order = sorted(family.common, key=family.common.__getitem__, reverse=True)
        lengths = [family.common[slot] for slot in order]
        saved = [self._costs.saved(count + 2, length) for count, length in enumerate(lengths)]
        best = max(range(len(order)), key=saved.__getitem__)
        if saved[best] <= 0:
            return None
        return np.array([family.leader, *order[: best + 1]], np.int32), lengths[best]


def _num_equal(one: Sequence[int], other: Sequence[int], block_size: int) -> int:
    """How many tokens the blocks hold that both begin with."""
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length) * block_size
