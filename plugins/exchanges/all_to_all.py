"""Sends each token to the ranks that hold its experts, once to each, and brings back what they add up to.

How many tokens go where is read on the host in each layer, so no step is captured. Tensor ranks, which have the same
tokens, send a share of them each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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

from .rows import Share, moved, token_counts


class _Sent(NamedTuple):
    """What `combine` needs: how many rows went to and came from each rank, and which token each sent row is of.

    `places` are the sent rows in the order of tokens, `lengths` int64 how many a token of the share has.
    """

    send_sizes: list[int]
    receive_sizes: list[int]
    places: Tensor
    lengths: Tensor
    share: Share


class AllToAllExchange(ExpertExchange):
    """Collectives of the platform with parts of any sizes: NCCL and gloo."""

    def __init__(self, setup: ExchangeSetup, options: Any = None) -> None:
        del options
        self._setup, self._group, self._tensor = setup, setup.groups.expert, setup.groups.tensor
        self._first = self._group.rank * setup.spec.slots_per_rank

    @classmethod
    def supports(cls, spec: ExchangeSpec) -> str | None:
        return None

    def dispatch(self, x: Activations, routing: Routing, step: ForwardStep | None) -> Dispatched:
        num_tokens = len(x.values)
        counts = token_counts(self._setup, num_tokens, step)
        share = self._share(num_tokens, self._tensor.rank)
        own, ids = share.own, routing.ids[share.own]
        ranks = torch.arange(self._group.size, device=ids.device)
        goes = (ids.div(self._setup.spec.slots_per_rank, rounding_mode="floor")[..., None] == ranks).any(1)  # [n, R]
        tokens = goes.t().nonzero()[:, 1]  # of the rows to rank 0, then of those to rank 1, …
        send_sizes, receive_sizes = self._sizes(goes.sum(0), counts)
        mine = Activations(x.values[own], None if x.scales is None else x.scales[own])
        sent = moved(
            mine,
            Routing(routing.weights[own], ids),
            self._first,
            lambda rows: self._group.all_to_all(rows[tokens], send_sizes, receive_sizes),
        )
        numbers = goes.t().flatten().cumsum(0).view(self._group.size, len(ids)).t() - 1  # [n, R]
        sent.handle = _Sent(send_sizes, receive_sizes, numbers[goes], goes.sum(1), share)
        return sent

    def combine(self, out: Tensor, sent: Dispatched) -> Tensor:
        how: _Sent = sent.handle
        back = self._group.all_to_all(out, how.receive_sizes, how.send_sizes)
        if not len(how.places):
            return how.share.spread(back.new_zeros(how.share.num_own, back.shape[1]))
        # summed in one order, so that equal inputs give equal bits
        sums = torch.segment_reduce(back[how.places].float(), "sum", lengths=how.lengths, axis=0, unsafe=True)
        return how.share.spread(sums.to(back.dtype))

    def _share(self, num_tokens: int, tensor_rank: int) -> Share:
        """The tokens that a tensor rank sends."""
        return Share.of(self._tensor, num_tokens, tensor_rank)

    def _sizes(self, sends: Tensor, counts: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Rows to and from each rank; in a rehearsal as many come as could."""
        ones = [1] * self._group.size
        receives = self._group.all_to_all(sends, ones, ones)
        both: list[list[int]] = torch.stack((sends, receives)).tolist()
        if self._group.is_silent:
            shares = [self._share(count, rank) for count in counts for rank in range(self._tensor.size)]
            return both[0], [share.num_own for share in shares]
        return both[0], both[1]
