"""Which rank sends which expert of a layer to which, in rounds that bound what a step copies. Knows no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from frame.core.interfaces.balancer import SlotShape


class Transfer(NamedTuple):
    """One copy of an expert from rank to rank."""

    expert: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class LayerMoves:
    """How one rank comes to its slots of a layer; every rank computes the same `rounds`.

    Local slots count from 0. `fills` are the (slot, expert) that change; `kept` the slot from which this rank copies an
    expert that it held before. In a round no rank sends or receives more than the limit.
    """

    fills: tuple[tuple[int, int], ...]
    kept: dict[int, int]
    rounds: tuple[tuple[Transfer, ...], ...]


def plan_moves(before: np.ndarray, after: np.ndarray, shape: SlotShape, rank: int, most_rows: int) -> LayerMoves:
    """The moves of `rank` for the slots' experts int32 [P] `before` and `after`; `most_rows` bounds a round."""
    old, new = before.reshape(shape.num_ranks, -1), after.reshape(shape.num_ranks, -1)
    fills = tuple((slot, int(new[rank, slot])) for slot in np.flatnonzero(old[rank] != new[rank]).tolist())
    held = {int(expert): slot for slot, expert in reversed(list(enumerate(old[rank])))}
    kept = {expert: held[expert] for _, expert in fills if expert in held}
    return LayerMoves(fills, kept, _rounds(_transfers(old, new, shape), most_rows))


def _transfers(old: np.ndarray, new: np.ndarray, shape: SlotShape) -> list[Transfer]:
    """Each expert that a rank needs and does not hold, once a rank, from the holder that sends the fewest."""
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for rank, experts in enumerate(old):
        for expert in set(experts.tolist()):
            holders[expert].append(rank)
    per_node, sends = max(1, shape.num_ranks // shape.num_nodes), [0] * shape.num_ranks
    found = []
    for receiver, experts in enumerate(new):
        for expert in sorted(set(experts.tolist()) - set(old[receiver].tolist())):
            node = receiver // per_node
            sender = min(holders[expert], key=lambda one: (sends[one], one // per_node != node, one))
            sends[sender] += 1
            found.append(Transfer(expert, sender, receiver))
    return found


def _rounds(transfers: Sequence[Transfer], most_rows: int) -> tuple[tuple[Transfer, ...], ...]:
    """Puts each transfer into the first round in which its sender and its receiver have room."""
    rounds: list[list[Transfer]] = []
    rows: list[defaultdict[tuple[str, int], int]] = []
    for one in transfers:
        ends = (("sends", one.sender), ("receives", one.receiver))
        place = next((n for n, used in enumerate(rows) if all(used[end] < most_rows for end in ends)), len(rounds))
        if place == len(rounds):
            rounds.append([])
            rows.append(defaultdict(int))
        rounds[place].append(one)
        for end in ends:
            rows[place][end] += 1
    return tuple(map(tuple, rounds))
