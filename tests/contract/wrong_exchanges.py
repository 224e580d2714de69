"""Expert exchanges that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import Tensor

from frame.interfaces import Activations, Dispatched, ForwardStep, LocalExchange, Routing
from frame.plugins.exchanges.all_to_all import AllToAllExchange
from frame.plugins.exchanges.gather import GatherExchange
from frame.plugins.exchanges.rows import Share


class Staying(GatherExchange):
    """Leaves tokens where they are: those of experts elsewhere get nothing."""

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        super().dispatch(x, routing, step)
        return LocalExchange(self._first).dispatch(x, routing, step)

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        return out


class Equal(GatherExchange):
    """Takes it that all data ranks have as many tokens as this one, but at most two."""

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        combined = super().combine(out, sent)
        return torch.cat((combined[:2], torch.zeros_like(combined[2:])))


class Twice(AllToAllExchange):
    """Every tensor rank sends all tokens, so that their sum is too large."""

    def _share(self, num_tokens: int, tensor_rank: int) -> Share:
        return Share(slice(0, num_tokens), num_tokens)


class Trusting(GatherExchange):
    """Believes whatever it was told of the tokens of each rank."""

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        return super().dispatch(x, routing, None)
