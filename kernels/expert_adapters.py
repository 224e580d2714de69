"""Adapters of routed experts in Triton; the reference is `adapted_experts` of `frame.core.ops.adapters`.

The products of the experts are those of `experts`, one after the other and without a gate inside, so that what the
adapters make of the same inputs can be added between. A pair is a token and one of its chosen experts. Pairs are sorted
twice, into blocks of one expert for the experts' weights, and into blocks of one adapter and expert for the adapters';
pairs without an adapter, and those of other ranks' experts, are in none of the latter. *Down* divides the inputs into
pieces, whose sums *up* adds in a fixed order. Grids come from the token count alone. Knows no layer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .expert_launch import invariant_launch, launch_for
from .experts import chip_of, combine, grouped_product, shape_of
from .gating import SILU, Biases, Gating, constants, gate_alone, gate_times
from .routing import Blocks, align

#: Pairs of a block, inputs that a program reads at a time, most pieces of the inputs, and outputs of a program.
_PAIRS, _INPUTS, _PIECES, _SPAN = 16, 128, 8, 64
_BLOCK = 1024


@triton.jit(do_not_specialize=["pairs", "first"])
def _group(ids, slots, groups, pairs, experts, first, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """The number of each pair's adapter and expert together, -1 where it has none or the expert is another rank's."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids + pair, mask=inside, other=-1) - first
    slot = tl.load(slots + pair // TOP_K, mask=inside, other=0)
    own = (slot > 0) & (expert >= 0) & (expert < experts)
    tl.store(groups + pair, tl.where(own, (slot - 1) * experts + expert, -1), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _down(
    x, stride_x, weights, sums, stride_sums, block_pairs, block_groups, used, pairs, num_inputs, num_rows, piece_size,
    SHARED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < tl.load(used):
        pair = tl.load(block_pairs + block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
        kept = pair < pairs
        piece, row_block = tl.program_id(1) // ROW_BLOCKS, tl.program_id(1) % ROW_BLOCKS
        rows = row_block * ROWS + tl.arange(0, ROWS)
        own = weights + tl.load(block_groups + block).to(tl.int64) * num_rows * num_inputs
        total = tl.zeros((PAIRS, ROWS), tl.float32)
        for start in range(piece * piece_size, tl.minimum((piece + 1) * piece_size, num_inputs), INPUTS):
            lanes = start + tl.arange(0, INPUTS)
            inside = lanes < num_inputs
            values = tl.load(
                x + (pair // SHARED)[:, None] * stride_x + lanes[None, :],
                mask=kept[:, None] & inside[None, :],
                other=0.0,
            )
            matrix = tl.load(
                own + rows[None, :].to(tl.int64) * num_inputs + lanes[:, None],
                mask=inside[:, None] & (rows[None, :] < num_rows),
                other=0.0,
            )
            total = tl.dot(values, matrix, total, input_precision="ieee")
        places = sums + piece.to(tl.int64) * stride_sums + pair[:, None] * num_rows + rows[None, :]
        tl.store(places, total, mask=kept[:, None] & (rows[None, :] < num_rows))


@triton.jit(do_not_specialize=["pairs"])
def _up(
    y, weights, sums, stride_sums, block_pairs, block_groups, used, pairs, num_outputs, part_outputs, num_rows, rank,
    PAIRS: tl.constexpr, RANK: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < tl.load(used):
        pair = tl.load(block_pairs + block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
        kept = pair < pairs
        spans = tl.cdiv(part_outputs, SPAN)
        part = tl.program_id(1) // spans
        inner_outputs = tl.program_id(1) % spans * SPAN + tl.arange(0, SPAN)
        inside = inner_outputs < part_outputs
        outputs = part * part_outputs + inner_outputs
        group = tl.load(block_groups + block).to(tl.int64)
        own = weights + (group * num_outputs + outputs[None, :]) * rank
        places = sums + pair[:, None] * num_rows + part * rank
        added = tl.zeros((PAIRS, SPAN), tl.float32)
        for first in range(0, rank, RANK):
            lanes = first + tl.arange(0, RANK)
            real = lanes < rank
            inner = tl.zeros((PAIRS, RANK), tl.float32)
            for piece in tl.static_range(PIECES):
                some = places + piece * stride_sums + lanes[None, :]
                inner += tl.load(some, mask=kept[:, None] & real[None, :], other=0.0)
            matrix = tl.load(own + lanes[:, None], mask=real[:, None] & inside[None, :], other=0.0)
            added = tl.dot(inner.to(matrix.dtype), matrix, added, input_precision="ieee")
        target = y + pair[:, None] * num_outputs + outputs[None, :]
        present = kept[:, None] & inside[None, :]
        before = tl.load(target, mask=present, other=0.0)
        # rounded before the sum, as two products of a library would be
        tl.store(target, before + added.to(before.dtype), mask=present)


@triton.jit
def _gate(
    x, out, size, GATED: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = lane < size
    start = x + row * size * (2 if GATED else 1) + lane
    value = tl.load(start, mask=kept, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(start + size, mask=kept, other=0.0).to(tl.float32)
        value = gate_times(value, up, FUNCTION, ALPHA, SHIFT, LIMIT)
    else:
        value = gate_alone(value, FUNCTION, ALPHA, LIMIT)
    tl.store(out + row * size + lane, value.to(out.dtype.element_ty), mask=kept)


def adapted_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, adapters: Any, slots: Tensor, *,
    of_all: int = 0, first: int = 0, gating: Gating | None = None, biases: Biases = (None, None),
    invariant: bool = False,
) -> Tensor:  # fmt: skip
    """As the reference, with `frame.ops.ExpertAdapters`; all contiguous but for the tokens of `hidden`.

    With `invariant` a token's bits depend on its own row alone.
    """
    if not hidden.shape[0]:
        return torch.empty_like(hidden)
    gating, shape, chip = gating or SILU, shape_of(down, ids.shape[1], of_all), chip_of(hidden.device)
    launch = invariant_launch(shape, chip) if invariant else launch_for(shape, len(hidden), chip)
    if launch.block_m == 0:  # which multiplies each pair by itself, and gates inside
        launch = invariant_launch(shape, chip)
    held = range(first, first + len(gate_up))
    blocks, own = align(ids, held, launch.block_m), _adapted_pairs(ids, slots, held, len(adapters.outer_up))
    inner = grouped_product(hidden, gate_up, blocks, launch.gate_up, shared=ids.shape[1], bias=biases[0])
    add_to_pairs(inner, hidden, own, adapters.inner_down, adapters.inner_up, shared=ids.shape[1])
    active = gate_pairs(inner, gating)
    products = grouped_product(active, down, blocks, launch.down, bias=biases[1])
    add_to_pairs(products, active, own, adapters.outer_down, adapters.outer_up)
    return combine(products, weights, ids, held)


def _adapted_pairs(ids: Tensor, slots: Tensor, held: range, num_slots: int) -> Blocks:
    groups = torch.empty_like(ids)
    pairs = ids.numel()
    _group[(triton.cdiv(pairs, _BLOCK),)](
        ids, slots, groups, pairs, len(held), held.start, TOP_K=ids.shape[1], BLOCK=_BLOCK
    )
    return align(groups, range(num_slots * len(held)), _PAIRS)


def add_to_pairs(y: Tensor, x: Tensor, blocks: Blocks, down: Tensor, up: Tensor, *, shared: int = 1) -> None:
    """Adds to row `pair` of y [pairs, P · N] what the matrices of the pair's group make of x[pair // shared] [K].

    `down` [S, E, P · r, K], `up` [S, E, P · N, r]; a group is s · E + e. Rows that `blocks` leaves out stay.
    """
    num_rows, num_inputs = down.shape[2:]
    num_outputs, rank = up.shape[2:]
    parts, pairs, most = num_rows // rank, blocks.num_pairs, len(blocks.slots)
    piece_size = max(_INPUTS, triton.cdiv(triton.cdiv(num_inputs, _PIECES), _INPUTS) * _INPUTS)
    pieces = triton.cdiv(num_inputs, piece_size)
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    row_blocks, part_outputs = triton.cdiv(num_rows, rows), num_outputs // parts
    sums = torch.empty(pieces, pairs, num_rows, dtype=torch.float32, device=x.device)
    given = blocks.slots, blocks.experts, blocks.used, pairs
    _down[(most, pieces * row_blocks)](
        x, x.stride(0), down, sums, sums.stride(0), *given, num_inputs, num_rows, piece_size,
        SHARED=shared, PAIRS=_PAIRS, ROWS=rows, INPUTS=_INPUTS, ROW_BLOCKS=row_blocks, num_warps=4,
    )  # fmt: skip
    _up[(most, parts * triton.cdiv(part_outputs, _SPAN))](
        y, up, sums, sums.stride(0), *given, num_outputs, part_outputs, num_rows, rank,
        PAIRS=_PAIRS, RANK=min(64, max(16, triton.next_power_of_2(rank))), SPAN=_SPAN, PIECES=pieces, num_warps=4,
    )  # fmt: skip


def gate_pairs(x: Tensor, gating: Gating) -> Tensor:
    """What `gating` makes of x [pairs, 2 · I], or [pairs, I] without a gate: [pairs, I]."""
    size = x.shape[1] // (2 if gating.gated else 1)
    out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    _gate[(len(x), triton.cdiv(size, block))](x, out, size, GATED=gating.gated, BLOCK=block, **constants(gating))
    return out
