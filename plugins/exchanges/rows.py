"""What exchanges do with tokens: who has how many, who sends which, and what travels with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from frame.interfaces import Activations, Dispatched, ExchangeSetup, ForwardStep, ProcessGroup, Routing


def token_counts(setup: ExchangeSetup, num_tokens: int, step: ForwardStep | None) -> tuple[int, ...]:
    """The tokens of each data rank; raises `ValueError` where this rank has another number than was agreed on."""
    data = setup.groups.data
    counts = (step.tokens_per_rank if step is not None else ()) or (num_tokens,) * data.size
    if len(counts) != data.size or counts[data.rank] != num_tokens:
        raise ValueError(f"data rank {data.rank} has {num_tokens} tokens, and {data.size} ranks agreed on {counts}")
    return counts


class Share(NamedTuple):
    """The tokens that a rank sends of the `num_tokens` that all ranks of its tensor group have."""

    own: slice
    num_tokens: int

    @classmethod
    def of(cls, tensor: ProcessGroup, num_tokens: int, rank: int | None = None) -> Share:
        """The share of a rank of the tensor group, by default of this one."""
        rank = tensor.rank if rank is None else rank
        return cls(slice(num_tokens * rank // tensor.size, num_tokens * (rank + 1) // tensor.size), num_tokens)

    @property
    def num_own(self) -> int:
        """Tokens of the share."""
        return int(self.own.stop - self.own.start)

    def spread(self, rows: Tensor) -> Tensor:
        """[num_tokens, H], where all but the share's `rows` are zero: its part of the sum over the tensor group."""
        if len(rows) == self.num_tokens:
            return rows
        whole = rows.new_zeros(self.num_tokens, rows.shape[1])
        whole[self.own] = rows
        return whole


def moved(x: Activations, routing: Routing, first_slot: int, move: Callable[[Tensor], Tensor]) -> Dispatched:
    """What `move` makes of the rows of all that belongs to tokens, with the slots counted from `first_slot`.

    Weights and slots travel as one tensor.
    """
    top_k = routing.ids.shape[1]
    packed = move(torch.cat((routing.weights.view(torch.int32), routing.ids), dim=1))
    weights, ids = packed.split(top_k, dim=1)
    scales = None if x.scales is None else _as_bytes(x.scales, move)
    return Dispatched(
        _as_bytes(x.values, move), scales, weights.contiguous().view(torch.float32), (ids - first_slot).contiguous()
    )


def _as_bytes(rows: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """`move(rows)`; eight-bit floats travel as bytes, which every library can move."""
    if rows.dtype.itemsize > 1 or not rows.dtype.is_floating_point:
        return move(rows)
    return move(rows.view(torch.uint8)).view(rows.dtype)
