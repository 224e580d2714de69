"""All-gather before the experts, reduce-scatter after them.

Every rank gets the tokens of all data ranks and computes those of its experts, so that a step moves as much whatever
the routing is: best where most ranks hold an expert of each token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from frame.interfaces import (
    Activations,
    Dispatched,
    ExchangeSetup,
    ExchangeSpec,
    ExpertExchange,
    ForwardStep,
    Routing,
)

from .rows import moved, token_counts


class GatherExchange(ExpertExchange):
    """Gathers over the data group alone: tensor ranks have the same tokens, and their parts are summed afterwards."""

    needs_python = False  # sizes are those of the step's shape

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        self._setup, self._data = setup, setup.groups.data
        self._first = setup.groups.expert.rank * setup.spec.slots_per_rank

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        sizes = token_counts(self._setup, len(x.values), step)
        sent = moved(x, routing, self._first, lambda rows: self._data.all_gather(rows, 0, sizes))
        sent.handle = sizes
        return sent

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        return self._data.reduce_scatter(out, 0, sent.handle)
