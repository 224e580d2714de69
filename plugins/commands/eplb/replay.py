"""Replays a trace of expert loads: each window runs with the placement that was made from the windows before it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from frame.interfaces import ExpertBalancer, ExpertPlacement, LoadRecord, SlotShape, balancedness
from frame.settings import PluginError


@dataclass
class Case:
    """A balancer and a shape, and what the replay of a trace found.

    `balance` is that of each window with the placement that held while it ran; `copies` counts the experts of all
    layers that ranks received from others at each placement, and `seconds` is what the balancer took for it.
    """

    policy: str
    balancer: ExpertBalancer
    shape: SlotShape
    balance: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def copied_bytes(self) -> list[int]:
        """Weights that ranks received at each placement."""
        return [count * self.shape.expert_bytes for count in self.copies]


def replay(trace: Iterable[LoadRecord], cases: Sequence[Case], interval: int) -> Sequence[Case]:
    """Fills `cases` from the records of `trace`, which is read once.

    A placement is made after every `interval` records. Raises `PluginError` for a balancer that fails.
    """
    placements: list[ExpertPlacement] = []
    window: np.ndarray | None = None
    for number, record in enumerate(trace, start=1):
        loads = record.loads
        if not placements:
            placements = [
                ExpertPlacement.initial(loads.shape[0], loads.shape[1], case.shape.num_slots) for case in cases
            ]
        window = loads if window is None else window + loads
        due = number % interval == 0
        for index, case in enumerate(cases):
            case.balance.append(balancedness(placements[index].rank_loads(loads, case.shape.num_ranks)))
            if due:
                placements[index] = _place(case, window, placements[index])
        if due:
            window = None
    return cases


def _place(case: Case, loads: np.ndarray, current: ExpertPlacement) -> ExpertPlacement:
    begun = time.perf_counter()
    try:
        made = case.balancer.place(loads, case.shape, current)
    except Exception as error:
        raise PluginError(f"balancer {case.policy!r} failed: {type(error).__name__}: {error}") from error
    case.seconds.append(time.perf_counter() - begun)
    if problems := made.problems(loads.shape[0], loads.shape[1], case.shape.num_slots):
        raise PluginError(f"balancer {case.policy!r} gave no placement: {'; '.join(problems)}")
    case.copies.append(int(made.received(current, case.shape.num_ranks).sum()))
    return made
