"""What adapters add to the products of linear layers: y += (x Aᵀ) Bᵀ, with the matrices of each token's slot.

S slots, T tokens, P tensors of the checkpoint that a layer puts together, r the highest rank (Hu et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotGroups:
    """The tokens of a step by their slots, in buffers that never move, for at most T tokens.

    `slots` int32 [T] is each token's slot, 0 for none. `order` int32 [T] are the tokens by slot, and those of slot s
    are `order[starts[s] : starts[s + 1]]`; `starts` int32 [S + 2].
    """

    slots: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def allocate(cls, max_tokens: int, num_slots: int, device: torch.device) -> SlotGroups:
        """Zeroed buffers on `device`."""
        return cls(
            *(torch.zeros(size, dtype=torch.int32, device=device) for size in (max_tokens, max_tokens, num_slots + 2))
        )


@dataclass(frozen=True)
class AdapterWeights:
    """The adapters of one linear layer, by slot less 1.

    `down` [S, P · r, in_features] has the rows of all parts' A, one part behind the other, zeros beyond an adapter's
    own rank; `up` [S, out_features, r] has B, scaled. `spans` int32 [n, 3] divides the outputs: rows from the first to
    below the second number belong to the part with the third; it lies on the host as `host_spans`, too.
    """

    down: Tensor
    up: Tensor
    spans: Tensor
    host_spans: tuple[tuple[int, int, int], ...]


def spread_slots(slots: Tensor, table: Tensor, rows: Tensor, query_start: Tensor, num_tokens: int) -> None:
    """slots[t] = table[row of token t] for the first `num_tokens` tokens, 0 for those that pad.

    `table` int32 [R] is by slot of the batch; of a step of B rows `rows` int32 [B] are these slots, and `query_start`
    int32 [B + 1] where each one's tokens begin.
    """
    place = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    ends = query_start[1:]
    row = torch.searchsorted(ends, place, right=True).clamp(max=len(rows) - 1)
    found = table.index_select(0, rows.index_select(0, row))
    slots[:num_tokens] = torch.where(place < ends[-1], found, 0)


def group_slots(groups: SlotGroups, num_tokens: int) -> None:
    """Fills `order` and `starts` from the first `num_tokens` of `slots`."""
    ordered, order = torch.sort(groups.slots[:num_tokens], stable=True)
    groups.order[:num_tokens] = order
    every = torch.arange(len(groups.starts), dtype=torch.int32, device=ordered.device)
    groups.starts.copy_(torch.searchsorted(ordered, every))


def add_adapters(y: Tensor, x: Tensor, weights: AdapterWeights, groups: SlotGroups) -> Tensor:
    """Adds to y [T, out_features] what each token's adapter makes of x [T, in_features]; returns y.

    Products are rounded to x's dtype between the two, as PEFT does.
    """
    rank = weights.up.shape[-1]
    slots = groups.slots[: len(x)]
    for slot in torch.unique(slots).tolist():
        if slot == 0:
            continue
        tokens = (slots == slot).nonzero().flatten()
        inner = x.index_select(0, tokens) @ weights.down[slot - 1].t()
        for start, stop, part in weights.host_spans:
            added = inner[:, part * rank : (part + 1) * rank] @ weights.up[slot - 1, start:stop].t()
            y[tokens, start:stop] += added
    return y
