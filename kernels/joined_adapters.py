"""What adapters add to a product that also multiplied their first matrices, in Triton; see `add_joined_adapters`.

The rows of A of all slots lie behind the rows of a layer's weight, so that one product makes y and x Aᵀ, and one launch
adds the rest, and gates halves where that is asked for. A program computes some outputs of some tokens: the product of
what each token's own slot made of it, zeros in the places of other slots, with the matrices of all slots side by side.
Matrices of slots that no token of the program has are not looked at. No result depends on other tokens. Knows no layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu_times
from .chain import await_previous, chained

#: Most outputs of a span.
SPAN = 128


class Sizes(NamedTuple):
    """Of a program: tokens, outputs (which divide `SPAN`), what its products add up at once, and warps.

    One that is `early` reads the matrices of all slots at once; others of those from the first to the last slot that
    their tokens have, which they must know before.
    """

    tokens: int
    outputs: int
    lanes: int
    num_warps: int
    early: bool


#: Up to how many tokens -> sizes, rising; the last ones are for all others. Measured on an H200
#: (`benchmarks/kernels/joined_adapters_sweep.py`).
SIZES = {
    1: Sizes(16, 64, 16, 4, False),
    16: Sizes(16, 64, 128, 4, True),
    512: Sizes(64, 64, 128, 4, True),
    1 << 30: Sizes(64, 64, 16, 4, False),
}


@triton.jit
def _pair(
    begin, inner, stride, up, tokens, mine, outputs, end, part, num_outputs, num_rows,
    SLOTS: tl.constexpr, RANK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What the tokens' own slots made of them, and the slots' matrices side by side: columns from `begin` on."""
    lane = begin + tl.arange(0, LANES)
    slot = lane // RANK
    own = mine[:, None] == slot[None, :]
    place = slot * num_rows + part * RANK + lane % RANK
    values = tl.load(inner + tokens.to(tl.int64)[:, None] * stride + place[None, :], mask=own, other=0.0)
    there = (outputs < end)[:, None] & (slot < SLOTS)[None, :]
    place = (slot.to(tl.int64) * num_outputs * RANK)[None, :] + (outputs * RANK)[:, None] + (lane % RANK)[None, :]
    matrix = tl.load(up + place, mask=there, other=0.0)
    used = tl.max(own.to(tl.int32), 0) > 0
    return values, tl.trans(tl.where(used[None, :], matrix, 0.0))


@triton.jit
def _place(span, ahead, ALIGNED: tl.constexpr):
    """(outputs, end, part) of a part of a span; ALIGNED spans begin and end at multiples of 8."""
    first, end = tl.load(span), tl.load(span + 1)
    if ALIGNED:
        first, end = tl.multiple_of(first, 8), tl.multiple_of(end, 8)
    return first + ahead, end, tl.load(span + 2)


@triton.jit(do_not_specialize=["num_tokens"])
def _joined_up(
    joined, stride, out, stride_out, up, slots, spans, num_tokens, num_outputs, num_rows, second,
    SLOTS: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    LANES: tl.constexpr, EARLY: tl.constexpr, ALIGNED: tl.constexpr, HALVES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: some tokens, a part of a span, and with HALVES what is `second` spans behind it, too."""
    await_previous(CHAINED)
    PIECES: tl.constexpr = SPAN // OUTPUTS
    span = spans + tl.program_id(0) // PIECES * 3
    ahead = tl.program_id(0) % PIECES * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs, end, part = _place(span, ahead, ALIGNED)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real = tokens < num_tokens
    mine = tl.load(slots + tokens, mask=real, other=0) - 1
    row = joined + tokens.to(tl.int64)[:, None] * stride
    present = real[:, None] & (outputs < end)[None, :]
    y = tl.load(row + outputs[None, :], mask=present, other=0.0)
    others, other_end, other_part, factor = outputs, end, part, y
    if HALVES:
        others, other_end, other_part = _place(span + second * 3, ahead, ALIGNED)
        factor = tl.load(row + others[None, :], mask=present, other=0.0)
    inner = joined + num_outputs
    added = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    other_added = added
    first, last = 0, tl.cdiv(SLOTS * RANK, LANES)
    if not EARLY:
        first = tl.min(tl.where(mine < 0, SLOTS, mine), 0) * RANK // LANES
        last = tl.cdiv((tl.max(mine, 0) + 1) * RANK, LANES)
    for step in tl.range(first, last, num_stages=1):
        values, matrix = _pair(
            step * LANES, inner, stride, up, tokens, mine, outputs, end, part, num_outputs, num_rows,
            SLOTS, RANK, LANES,
        )  # fmt: skip
        if HALVES:
            other_values, other_matrix = _pair(
                step * LANES, inner, stride, up, tokens, mine, others, other_end, other_part, num_outputs, num_rows,
                SLOTS, RANK, LANES,
            )  # fmt: skip
            other_added = tl.dot(other_values, other_matrix, other_added, input_precision="ieee")
        added = tl.dot(values, matrix, added, input_precision="ieee")
    # rounded before the sum, as two products of a library would be
    result = y + added.to(y.dtype)
    if HALVES:
        result = silu_times(result, factor + other_added.to(y.dtype), y.dtype).to(y.dtype)
    target = out + tokens.to(tl.int64)[:, None] * stride_out + outputs[None, :]
    tl.store(target, result, mask=present)


def add_joined_adapters(
    joined: Tensor, weights: Any, groups: Any, *, halves: bool = False, sizes: Sizes | None = None
) -> Tensor:
    """As the reference, with `frame.ops.AdapterWeights` and `SlotGroups`; each row and matrix lies in one piece.

    Halves have as many spans as each other, of the same sizes. `sizes` are for measurements.
    """
    num_tokens = len(joined)
    num_slots, num_rows, _ = weights.down.shape
    num_outputs, rank = weights.up.shape[1:]
    count, width = (len(weights.spans) // 2, num_outputs // 2) if halves else (len(weights.spans), num_outputs)
    out = torch.empty(num_tokens, width, dtype=joined.dtype, device=joined.device)
    if num_tokens == 0 or count == 0:
        return out
    tokens, outputs, lanes, num_warps, early = sizes or next(one for most, one in SIZES.items() if num_tokens <= most)
    lanes = max(lanes, min(64, triton.next_power_of_2(rank)))
    aligned = all(edge % 8 == 0 for first, end, _ in weights.host_spans for edge in (first, end))
    _joined_up[(count * (SPAN // outputs), triton.cdiv(num_tokens, tokens))](
        joined, joined.stride(0), out, out.stride(0), weights.up, groups.slots, weights.spans, num_tokens,
        num_outputs, num_rows, count, SLOTS=num_slots, RANK=rank, SPAN=SPAN, TOKENS=tokens, OUTPUTS=outputs,
        LANES=lanes, EARLY=early, ALIGNED=aligned, HALVES=halves, num_warps=num_warps, **chained(joined.device),
    )  # fmt: skip
    return out
