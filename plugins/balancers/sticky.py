"""Expert placement that changes little: replicas stay where they are unless a move saves more time than it takes.

Each layer is placed by itself, in two steps. First experts that have become hot take slots from experts that have more
replicas than they need. Then the fullest rank exchanges experts with others, one pair at a time. Of all placements on
the way the one counts that saves the most time net of copying, which may be the one that is there. Knows no nodes and
no groups of experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frame.interfaces import ExpertBalancer, ExpertPlacement, Setup, SlotShape

from .sticky_options import StickyOptions

#: An expert takes a slot where its replicas have at least this many times the tokens that the other expert's would have
#: without it. Each is tried, since small ones move more and may balance better; the last moves no replica.
_RATIOS = (1.05, 1.5, np.inf)


class StickyBalancer(ExpertBalancer):
    """A token more on the fullest rank costs `microseconds_per_token`, a copied expert its bytes over the copy rate."""

    def __init__(self, setup: Setup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._options: StickyOptions = options or StickyOptions()

    def place(self, loads: np.ndarray, shape: SlotShape, current: ExpertPlacement) -> ExpertPlacement:
        if problems := shape.problems(loads.shape[1]):
            raise ValueError("; ".join(problems))
        options = self._options
        copy_microseconds = shape.expert_bytes / (options.copy_gigabytes_per_second * shape.num_ranks) / 1e3
        copy_tokens = copy_microseconds / (options.microseconds_per_token * options.windows)
        pairs = zip(loads.astype(np.float64), current.expert_of, strict=True)
        expert_of = np.stack([_place_layer(load, held, shape.num_ranks, copy_tokens) for load, held in pairs])
        return current if np.array_equal(expert_of, current.expert_of) else ExpertPlacement.of(expert_of)


def _place_layer(loads: np.ndarray, held: np.ndarray, num_ranks: int, copy_tokens: float) -> np.ndarray:
    """The experts of the slots, int32 [P], for tokens `loads` [E]; a copy costs as much as `copy_tokens` tokens."""
    best, cheapest = held, np.inf
    for ratio in reversed(_RATIOS):
        layer = _Layer(loads, held, num_ranks)
        if ratio != np.inf and not layer.move_replicas(ratio):
            continue
        for _ in range(2 * len(held)):
            cost = layer.fullest + copy_tokens * layer.num_copies
            if cost < cheapest:
                best, cheapest = layer.expert_of.copy(), cost
            # The exchanges that are left cannot save more than this.
            if layer.fullest - layer.mean <= max(2 * copy_tokens, 1e-9 * layer.mean) or not layer.exchange():
                break
    return best


class _Layer:
    """The slots of one layer while they are changed."""

    def __init__(self, loads: np.ndarray, held: np.ndarray, num_ranks: int) -> None:
        experts = len(loads)
        self._loads, self.expert_of = loads, held.copy()
        self._rank_of = np.arange(len(held)) // (len(held) // num_ranks)
        # [R, E]: how many slots of a rank hold an expert, now and before any change.
        self._slots = np.zeros((num_ranks, experts), dtype=np.int64)
        np.add.at(self._slots, (self._rank_of, held), 1)
        self._before = self._slots > 0
        self.num_copies = 0
        self.mean = float(loads.sum()) / num_ranks
        self._count()

    def _count(self) -> None:
        """Tokens of one replica of each expert [E], and of each rank [R]."""
        self._each = self._loads / self._slots.sum(0)
        self._rank_loads = self._slots @ self._each

    @property
    def fullest(self) -> float:
        """Tokens of the fullest rank."""
        return float(self._rank_loads.max())

    def _fill(self, slot: int, expert: int) -> None:
        """Gives a slot another expert, and counts the experts that ranks hold now and did not hold before."""
        rank, old = self._rank_of[slot], self.expert_of[slot]
        self._slots[rank, old] -= 1
        if not self._slots[rank, old] and not self._before[rank, old]:
            self.num_copies -= 1
        if not self._slots[rank, expert] and not self._before[rank, expert]:
            self.num_copies += 1
        self._slots[rank, expert] += 1
        self.expert_of[slot] = expert

    def move_replicas(self, ratio: float) -> bool:
        """Gives slots of experts with spare replicas to hot ones, see `_RATIOS`; whether there were any."""
        replicas = self._slots.sum(0)
        taken, given = [], []
        for _ in range(len(self.expert_of)):
            hot = int((self._loads / replicas).argmax())
            without = np.where(replicas > 1, self._loads / np.maximum(replicas - 1, 1), np.inf)
            without[hot] = np.inf
            spare = int(without.argmin())
            if self._loads[hot] / replicas[hot] <= ratio * without[spare]:
                break
            replicas[hot], replicas[spare] = replicas[hot] + 1, replicas[spare] - 1
            taken.append(spare)
            given.append(hot)
        self._refill(taken, given, self._loads / replicas)
        self._count()
        return bool(taken)

    def _refill(self, taken: list[int], given: list[int], each: np.ndarray) -> None:
        """Takes a slot from each expert in `taken` and gives them to those in `given`, the lightest ranks' slots first.

        `each` are the tokens of one replica of each expert afterwards, [E].
        """
        rank_loads = self._slots @ each
        freed: list[int] = []
        for expert in taken:
            slots = np.setdiff1d(np.flatnonzero(self.expert_of == expert), freed)
            slot = int(slots[rank_loads[self._rank_of[slots]].argmax()])
            rank_loads[self._rank_of[slot]] -= each[expert]
            freed.append(slot)
        for expert in sorted(given, key=lambda one: (-each[one], one)):
            ranks = self._rank_of[freed]
            # A second replica on a rank is of no use, so such a rank comes last.
            order = np.lexsort((ranks, rank_loads[ranks], self._slots[ranks, expert] > 0))
            slot = freed.pop(int(order[0]))
            rank_loads[self._rank_of[slot]] += each[expert]
            self._fill(slot, expert)

    def exchange(self) -> bool:
        """The fullest rank exchanges the pair of experts that evens out two ranks the most; False where none does."""
        hot = int(self._rank_loads.argmax())
        own = np.flatnonzero(self._rank_of == hot)
        mine, theirs = self.expert_of[own], self.expert_of
        # [slots of the fullest rank, P]: tokens that leave the fullest rank with each exchange.
        leaving = self._each[mine][:, None] - self._each[theirs]
        room = self._rank_loads[hot] - self._rank_loads[self._rank_of]
        gains = leaving * (room - leaving)
        fits = (leaving > 0) & (gains > 1e-9 * self.mean**2) & (self._slots[hot, theirs] == 0)
        fits &= self._slots[self._rank_of][:, mine].T == 0
        if not fits.any():
            return False
        place, other = np.unravel_index(int(np.where(fits, gains, -np.inf).argmax()), gains.shape)
        first, moved = int(own[place]), float(leaving[place, other])
        expert, back = int(mine[place]), int(theirs[other])
        self._fill(first, back)
        self._fill(int(other), expert)
        self._rank_loads[hot] -= moved
        self._rank_loads[self._rank_of[other]] += moved
        return True
