"""What adapters add to products: y += (x Aᵀ) Bᵀ, with the matrices of each token's slot, and of its experts.

S slots, T tokens, P tensors of the checkpoint that a layer puts together, r the highest rank (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..interfaces.experts import SILU, Gating
from .layers import NO_BIASES, ExpertBiases, gated, silu_mul


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
    below the second number belong to the part with the third; it lies on the host as `host_spans`, too. Where ranks
    divide the rows of A, `down` has this rank's, and `gather` makes [T, P · r] of what each rank has of x Aᵀ.
    """

    down: Tensor
    up: Tensor
    spans: Tensor
    host_spans: tuple[tuple[int, int, int], ...]
    gather: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class ExpertAdapters:
    """The adapters of a layer's E routed experts, by slot less 1.

    Of gate and up, P = 2 parts, or up alone: `inner_down` [S, E, P · r, H] and `inner_up` [S, E, P · I, r], part by
    part, as in `AdapterWeights`. Of down: `outer_down` [S, E, r, I] and `outer_up` [S, E, H, r].
    """

    inner_down: Tensor
    inner_up: Tensor
    outer_down: Tensor
    outer_up: Tensor


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
    by_slot = [(slot, (slots == slot).nonzero().flatten()) for slot in torch.unique(slots).tolist() if slot]
    inner = x.new_zeros(len(x), weights.down.shape[1])
    for slot, tokens in by_slot:
        inner[tokens] = x.index_select(0, tokens) @ weights.down[slot - 1].t()
    if weights.gather is not None:
        inner = weights.gather(inner)
    for slot, tokens in by_slot:
        for start, stop, part in weights.host_spans:
            added = inner[tokens, part * rank : (part + 1) * rank] @ weights.up[slot - 1, start:stop].t()
            y[tokens, start:stop] += added
    return y


def add_joined_adapters(joined: Tensor, weights: AdapterWeights, groups: SlotGroups, *, halves: bool = False) -> Tensor:
    """As `add_adapters`, from one product with the layer's weight and the rows of all slots' `down` behind it.

    `joined` [T, out_features + S · P · r] has y, and behind it x Aᵀ of every slot. Returns a new [T, out_features], or
    of its `halves` a, b silu(a) · b, which parts do not share. Weights with `gather` are not multiplied so.
    """
    outputs, rank, height = *weights.up.shape[1:], weights.down.shape[1]
    y, slots = joined[:, :outputs].clone(), groups.slots[: len(joined)]
    for slot in filter(None, torch.unique(slots).tolist()):
        tokens = (slots == slot).nonzero().flatten()
        inner = joined[tokens, outputs + (slot - 1) * height : outputs + slot * height]
        for start, stop, part in weights.host_spans:
            y[tokens, start:stop] += inner[:, part * rank : (part + 1) * rank] @ weights.up[slot - 1, start:stop].t()
    return silu_mul(y) if halves else y


def adapted_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, adapters: ExpertAdapters,
    slots: Tensor, *, of_all: int = 0, first: int = 0, gating: Gating = SILU, biases: ExpertBiases = NO_BIASES,
) -> Tensor:  # fmt: skip
    """As `fused_experts`, with what the adapter of each token's slot, int32 [T], adds to both products of its experts.

    That of gate and up is added before the gating, that of down before the router's weights.
    """
    del of_all
    out, (inner_bias, outer_bias) = torch.zeros_like(hidden), biases
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(ids == expert + first)
        if token.numel() == 0:
            continue
        x, own = hidden[token], slots[token]
        inner = functional.linear(x, gate_up[expert], None if inner_bias is None else inner_bias[expert])
        _add_parts(inner, x, own, adapters.inner_down[:, expert], adapters.inner_up[:, expert])
        active = gated(inner, gating)
        value = functional.linear(active, down[expert], None if outer_bias is None else outer_bias[expert])
        _add_parts(value, active, own, adapters.outer_down[:, expert], adapters.outer_up[:, expert])
        out.index_add_(0, token, value * weights[token, choice].unsqueeze(-1).to(value.dtype))
    return out


def _add_parts(y: Tensor, x: Tensor, slots: Tensor, down: Tensor, up: Tensor) -> None:
    """Adds to y [n, P · N] what the slots' matrices make of x: down [S, P · r, K], up [S, P · N, r]."""
    rank = up.shape[-1]
    for slot in torch.unique(slots).tolist():
        if slot == 0:
            continue
        rows = (slots == slot).nonzero().flatten()
        inner = functional.linear(x[rows], down[slot - 1]).unflatten(-1, (-1, rank))
        parts = up[slot - 1].unflatten(0, (inner.shape[1], -1))
        y[rows] += torch.einsum("npr,por->npo", inner, parts).flatten(1)
