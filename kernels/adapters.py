"""Adapters in Triton: y += (x Aᵀ) Bᵀ with the matrices of each token's slot; see `frame.core.ops.adapters`.

Two launches for a layer, whatever tensors it puts together and however many adapters its tokens have. Programs are
laid out over the most blocks of tokens of one slot that so many tokens can fill, and find theirs on the device; some
have none and end at once, so that a launch depends on the number of tokens alone and a captured one serves every batch
of that size. *Down* divides the inputs into pieces, whose sums *up* adds in a fixed order. No result depends on other
tokens. Knows no layer.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hopper import hopper_kernel

#: Tokens of a program, inputs that it reads at a time, most pieces of the inputs, and most outputs of a span.
_TOKENS, _INPUTS, _PIECES, SPAN = 16, 128, 8, 128
_BLOCK = 512
#: Up to how many tokens -> inputs of a program of `few_adapters`, rising; taken on Hopper, and measured on an H200
#: (`benchmarks/kernels/adapters_sweep.py`).
FEW = {16: 512, 64: 1024}


@triton.jit
def _mine(order, starts, num_slots, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """A program's slot, the tokens of its block there, which of them there are, and whether it has a block at all."""
    slots = tl.arange(0, SLOTS)
    real = slots < num_slots
    firsts = tl.load(starts + 1 + slots, mask=real, other=0)
    ends = tl.load(starts + 2 + slots, mask=real, other=0)
    blocks = tl.cdiv(ends - firsts, BLOCK)
    until = tl.cumsum(blocks, 0)
    number = tl.program_id(0)
    slot = tl.sum((real & (until <= number)).to(tl.int32), 0)
    own = slots == slot
    first = tl.sum(tl.where(own, firsts + (number - until + blocks) * BLOCK, 0), 0)
    place = first + tl.arange(0, BLOCK)
    kept = place < tl.sum(tl.where(own, ends, 0), 0)
    tokens = tl.load(order + place, mask=kept, other=0).to(tl.int64)
    return slot.to(tl.int64), tokens, kept, slot < num_slots


@triton.jit
def _down(
    x, stride_x, weights, sums, stride_sums, order, starts, num_slots, num_inputs, num_rows, piece_size,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, ROW_BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot, tokens, kept, any_token = _mine(order, starts, num_slots, TOKENS, SLOTS)
    if any_token:
        piece, block = tl.program_id(1) // ROW_BLOCKS, tl.program_id(1) % ROW_BLOCKS
        rows = block * ROWS + tl.arange(0, ROWS)
        own = weights + slot * num_rows * num_inputs
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for start in range(piece * piece_size, tl.minimum((piece + 1) * piece_size, num_inputs), INPUTS):
            lanes = start + tl.arange(0, INPUTS)
            inside = lanes < num_inputs
            values = tl.load(
                x + tokens[:, None] * stride_x + lanes[None, :], mask=kept[:, None] & inside[None, :], other=0.0
            )
            matrix = tl.load(
                own + rows[None, :].to(tl.int64) * num_inputs + lanes[:, None],
                mask=inside[:, None] & (rows[None, :] < num_rows),
                other=0.0,
            )
            total = tl.dot(values, matrix, total, input_precision="ieee")
        places = sums + piece * stride_sums + tokens[:, None] * num_rows + rows[None, :]
        tl.store(places, total, mask=kept[:, None] & (rows[None, :] < num_rows))


@triton.jit
def _up(
    y, stride_y, weights, sums, stride_sums, spans, order, starts, num_slots, num_outputs, num_rows, rank,
    TOKENS: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot, tokens, kept, any_token = _mine(order, starts, num_slots, TOKENS, SLOTS)
    if any_token:
        span = spans + tl.program_id(1) * 3
        outputs = tl.load(span) + tl.arange(0, SPAN)
        inside = outputs < tl.load(span + 1)
        own = weights + (slot * num_outputs + outputs[None, :]) * rank
        places = sums + tokens[:, None] * num_rows + tl.load(span + 2) * rank
        added = tl.zeros((TOKENS, SPAN), tl.float32)
        for first in range(0, rank, RANK):
            lanes = first + tl.arange(0, RANK)
            real = lanes < rank
            inner = tl.zeros((TOKENS, RANK), tl.float32)
            for piece in tl.static_range(PIECES):
                part = places + piece * stride_sums + lanes[None, :]
                inner += tl.load(part, mask=kept[:, None] & real[None, :], other=0.0)
            matrix = tl.load(own + lanes[:, None], mask=real[:, None] & inside[None, :], other=0.0)
            added = tl.dot(inner.to(matrix.dtype), matrix, added, input_precision="ieee")
        target = y + tokens[:, None] * stride_y + outputs[None, :]
        present = kept[:, None] & inside[None, :]
        before = tl.load(target, mask=present, other=0.0)
        # rounded before the sum, as two products of a library would be
        tl.store(target, before + added.to(before.dtype), mask=present)


def add_adapters(y: Tensor, x: Tensor, weights: Any, groups: Any) -> Tensor:
    """As the reference, with `frame.ops.AdapterWeights` and `SlotGroups`; each row and matrix lies in one piece."""
    num_tokens, num_inputs = x.shape
    num_slots, num_rows, _ = weights.down.shape
    num_outputs, rank = weights.up.shape[1:]
    if num_tokens == 0 or len(weights.spans) == 0:
        return y
    if (piece := next((found for most, found in FEW.items() if num_tokens <= most), None)) is not None:
        few = hopper_kernel(x.device, "few_adapters", "add_few")
        if few is not None and (out := few(y, x, weights, groups, piece)) is not None:
            return out
    blocks = num_tokens // _TOKENS + min(num_slots, num_tokens)
    slots = triton.next_power_of_2(num_slots)
    piece_size = max(_INPUTS, triton.cdiv(triton.cdiv(num_inputs, _PIECES), _INPUTS) * _INPUTS)
    pieces = triton.cdiv(num_inputs, piece_size)
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    row_blocks = triton.cdiv(num_rows, rows)
    sums = torch.empty(pieces, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    _down[(blocks, pieces * row_blocks)](
        x, x.stride(0), weights.down, sums, sums.stride(0), groups.order, groups.starts, num_slots, num_inputs,
        num_rows, piece_size, TOKENS=_TOKENS, ROWS=rows, INPUTS=_INPUTS, ROW_BLOCKS=row_blocks, SLOTS=slots,
        num_warps=4,
    )  # fmt: skip
    if weights.gather is not None:
        inner = weights.gather(reduce(torch.add, sums.unbind(0)).to(x.dtype))  # in the order of *up*
        sums, num_rows, pieces = inner.float()[None].contiguous(), inner.shape[1], 1
    _up[(blocks, len(weights.spans))](
        y, y.stride(0), weights.up, sums, sums.stride(0), weights.spans, groups.order, groups.starts, num_slots,
        num_outputs, num_rows, rank, TOKENS=_TOKENS, RANK=min(64, max(16, triton.next_power_of_2(rank))), SPAN=SPAN,
        PIECES=pieces, SLOTS=slots, num_warps=4, num_stages=1 if rank < 64 else 2,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["batch", "num_tokens"])
def _spread(slots, table, rows, query_start, batch, num_tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    real = row < batch
    # the program after the last row fills padding
    start = tl.load(query_start + row)
    end = tl.load(query_start + row + 1, mask=real, other=0)
    end = tl.where(real, end, num_tokens)
    slot = tl.load(table + tl.load(rows + row, mask=real, other=0), mask=real, other=0)
    for first in range(start, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(slots + place, tl.zeros([BLOCK], tl.int32) + slot, mask=place < end)


def spread_slots(slots: Tensor, table: Tensor, rows: Tensor, query_start: Tensor, num_tokens: int) -> None:
    """As the reference, in one launch; `table` is in one piece."""
    batch = len(rows)
    _spread[(batch + 1,)](slots, table, rows, query_start, batch, num_tokens, BLOCK=_BLOCK)
