"""What both exchanges do with tokens: who has how many, and what travels with each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from frame.interfaces import Activations, Dispatched, ExchangeSetup, ForwardStep, Routing


def token_counts(setup: ExchangeSetup, num_tokens: int, step: ForwardStep | None) -> tuple[int, ...]:
    """The tokens of each data rank; raises `ValueError` where this rank has another number than was agreed on."""
    data = setup.groups.data
    counts = (step.tokens_per_rank if step is not None else ()) or (num_tokens,) * data.size
    if len(counts) != data.size or counts[data.rank] != num_tokens:
        raise ValueError(f"data rank {data.rank} has {num_tokens} tokens, and {data.size} ranks agreed on {counts}")
    return counts


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
