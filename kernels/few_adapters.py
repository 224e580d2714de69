"""Adapters of some tokens and few slots, for Hopper; as `adapters`, whose programs each wait for what they look up.

*Down* reads all of a piece of the inputs at once, in the registers of matrix instructions: of x only the tokens of its
slot. *Up* multiplies all tokens by the matrices of all slots, each of which keeps the results of its own tokens: so
each program reads what it needs at once, and there are no more programs than run at the same time. No result depends
on other tokens.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _nothing, _with
from .portable import INTERPRETED, gl, gluon, mma_v2

barrier = gl.barrier if INTERPRETED else real_barrier
#: Outputs of a span; tokens of a program; the most pieces of the inputs; slots that are read at once.
SPAN, TOKENS, PIECES, SLOTS = 128, 16, 32, 8


@gluon.jit(do_not_specialize=["num_tokens"])
def _down_few(
    x, stride_x, weights, sums, stride_sums, slots, num_tokens, num_inputs, num_rows, piece_size,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, XS: tl.constexpr, SUMS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: 16 rows of a slot, a piece of the inputs, some tokens. Its warps divide the piece."""
    X: tl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    A: tl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    first_row = gl.program_id(0) * 16
    begin = gl.program_id(1) * piece_size
    end = gl.minimum(begin + piece_size, num_inputs)
    slot = first_row // num_rows
    part = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, WIDE)))[:, None, None] * 64
    lane = part + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, WIDE)))[None, None, :]
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, WIDE)))[None, :, None]
    matrix = weights + (first_row + row).to(gl.int64) * num_inputs + lane
    inside = lane + row * 0
    rows = gl.load(matrix + begin, mask=begin + inside < end, other=0.0)
    await_previous(CHAINED)
    token = gl.program_id(2) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, XS)))
    own = (gl.load(slots + token, mask=token < num_tokens, other=0) == slot + 1)[None, :, None]
    part = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, XS)))[:, None, None] * 64
    lane = part + gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, XS)))[None, None, :]
    source = x + token.to(gl.int64)[None, :, None] * stride_x + lane
    total = gl.zeros([8, TOKENS, 16], gl.float32, SUMS)
    for start in range(begin, end, 512):
        values = gl.load(source + start, mask=own & (start + lane < end), other=0.0)
        left = gl.convert_layout(values, X, assert_trivial=True)
        right = gl.convert_layout(gl.permute(rows, (0, 2, 1)), A, assert_trivial=True)
        total = mma_v2(left, right, total)
        rows = gl.load(matrix + (start + 512), mask=start + 512 + inside < end, other=0.0)
    total = gl.sum(total, 0)
    token = gl.program_id(2) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    own = gl.load(slots + token, mask=token < num_tokens, other=0) == slot + 1
    column = first_row % num_rows + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    place = sums + gl.program_id(1) * stride_sums + (token * num_rows)[:, None] + column[None, :]
    gl.store(place, total, mask=own[:, None])


@gluon.jit
def _matrices(source, inside, first, num_slots, stride, SLOTS: tl.constexpr):
    """The matrices of `SLOTS` slots from `first` on."""
    found = _nothing()
    for slot in gl.static_range(SLOTS):
        there = inside & (first + slot < num_slots)
        found = _with(found, gl.load(source + (first + slot).to(gl.int64) * stride, mask=there, other=0.0))
    return found


@gluon.jit
def _own_products(
    added, ups, lefts, source, inside, own, first, num_slots, stride,
    RANK: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """`added` with the products of the tokens of `SLOTS` slots from `first` on."""
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, ADDED, 4)
    for slot in gl.static_range(SLOTS):
        product = gl.zeros([TOKENS, 128], gl.float32, ADDED)
        for chunk in gl.static_range(RANK // 16):
            matrix = ups[slot]
            if chunk > 0:
                there = inside & (first + slot < num_slots)
                matrix = gl.load(source + (first + slot).to(gl.int64) * stride + chunk * 16, mask=there, other=0.0)
            right = gl.convert_layout(gl.permute(matrix, (1, 0)), RIGHT, assert_trivial=True)
            product = mma_v2(lefts[chunk], right, product)
        added = gl.where((own == first + slot + 1)[:, None], product, added)
    return added


@gluon.jit(do_not_specialize=["num_tokens"])
def _up_few(
    y, stride_y, weights, sums, stride_sums, spans, slots, num_tokens, num_slots, num_outputs, num_rows,
    PIECES: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, INNER: tl.constexpr,
    UPS: tl.constexpr, Y: tl.constexpr, ADDED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: a span of the outputs, some tokens, all slots."""
    LEFT: tl.constexpr = gl.DotOperandLayout(0, ADDED, 4)
    span = spans + gl.program_id(1) * 3
    first_output, end, part = gl.load(span), gl.load(span + 1), gl.load(span + 2)
    # a thread's outputs follow one another, so those of an instruction do not
    number = gl.arange(0, 128, gl.SliceLayout(1, UPS))
    output = first_output + number // 8 % 8 * 16 + number // 2 % 4 * 4 + number // 64 * 2 + number % 2
    lane = gl.arange(0, 16, gl.SliceLayout(0, UPS))
    source = weights + (output * RANK)[:, None] + lane[None, :]
    inside = (output < end)[:, None] & (lane < 16)[None, :]
    stride = num_outputs * RANK
    ups = _matrices(source, inside, end * 0, num_slots, stride, SLOTS)
    await_previous(CHAINED)
    row = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, Y))
    mine = gl.load(slots + row, mask=row < num_tokens, other=0)
    column = first_output + gl.arange(0, 128, gl.SliceLayout(0, Y))
    target = y + row.to(gl.int64)[:, None] * stride_y + column[None, :]
    present = (mine > 0)[:, None] & (column < end)[None, :]
    before = gl.load(target, mask=present, other=0.0)
    own = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, ADDED))
    own = gl.load(slots + own, mask=own < num_tokens, other=0)
    token = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, INNER))
    theirs = gl.load(slots + token, mask=token < num_tokens, other=0) > 0
    inner_lane = gl.arange(0, 16, gl.SliceLayout(0, INNER))
    place = sums + (token * num_rows + part * RANK)[:, None] + inner_lane[None, :]
    known = theirs[:, None] & (inner_lane < 16)[None, :]
    lefts = _nothing()
    for chunk in gl.static_range(RANK // 16):
        inner = gl.zeros([TOKENS, 16], gl.float32, INNER)
        for piece in gl.static_range(PIECES):
            inner += gl.load(place + (chunk * 16 + piece * stride_sums), mask=known, other=0.0)
        lefts = _with(lefts, gl.convert_layout(inner.to(y.dtype.element_ty), LEFT))
    added = gl.zeros([TOKENS, 128], gl.float32, ADDED)
    added = _own_products(
        added, ups, lefts, source, inside, own, end * 0, num_slots, stride, RANK, TOKENS, SLOTS, ADDED
    )
    for first in range(SLOTS, num_slots, SLOTS):
        ups = _matrices(source, inside, end * 0 + first, num_slots, stride, SLOTS)
        added = _own_products(
            added, ups, lefts, source, inside, own, end * 0 + first, num_slots, stride, RANK, TOKENS, SLOTS, ADDED
        )
    added = gl.permute(gl.reshape(added.to(y.dtype.element_ty), (TOKENS, 2, 8, 4, 2)), (0, 2, 3, 1, 4))
    added = gl.convert_layout(gl.reshape(added, (TOKENS, 128)), Y, assert_trivial=True)
    # rounded before the sum, as two products of a library would be
    gl.store(target, before + added, mask=present)


@lru_cache(maxsize=1)
def _layouts() -> tuple[dict[str, object], dict[str, object]]:
    """How eight warps hold what *down* and what *up* reads and adds up."""
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    sixteen = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], [0, 0, 32]]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    down = {
        "WIDE": gl.DistributedLinearLayout(sixteen, lanes, warps, [], [8, 16, 64]),
        "XS": gl.DistributedLinearLayout(sixteen, lanes, warps, [], [8, TOKENS, 64]),
        "SUMS": gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]),
    }  # fmt: skip
    eight = [[1, 0], [2, 0], [4, 0]]
    up = {
        "INNER": gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]),
        "UPS": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [64, 0]], [[0, 4], [0, 8], *eight], [[8, 0], [16, 0], [32, 0]], [], [128, 16]
        ),
        "Y": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *eight], [[0, 16], [0, 32], [0, 64]], [], [TOKENS, 128],
        ),
        "ADDED": gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8]),
    }  # fmt: skip
    return down, up


def fits(y: Tensor, x: Tensor, weights: Any) -> bool:
    """Whether there is a kernel for such tokens and adapters: of 16 bits, whole rows of 16 bytes, few slots."""
    num_slots, _, num_inputs = weights.down.shape
    rank = weights.up.shape[2]
    return (
        weights.gather is None
        and rank in (16, 32, 64)
        and num_slots <= 2 * SLOTS
        and x.dtype == weights.down.dtype
        and x.dtype.itemsize == 2
        and num_inputs % 8 == 0
        and x.stride(0) % 8 == 0
        and y.stride(0) % 8 == 0
    )


def add_few(y: Tensor, x: Tensor, weights: Any, groups: Any, piece: int) -> Tensor | None:
    """`add_adapters`; None where there is no kernel."""
    return add_adapters(y, x, weights, groups, piece) if fits(y, x, weights) else None


def add_adapters(y: Tensor, x: Tensor, weights: Any, groups: Any, piece: int) -> Tensor:
    """As `adapters.add_adapters`, of what `fits`. A program of *down* has `piece` inputs, a multiple of 512."""
    num_tokens, num_inputs = x.shape
    num_slots, num_rows, _ = weights.down.shape
    num_outputs, rank = weights.up.shape[1:]
    if num_tokens == 0 or len(weights.spans) == 0:
        return y
    pieces = triton.cdiv(num_inputs, piece)
    if pieces > PIECES:
        piece = triton.cdiv(triton.cdiv(num_inputs, PIECES), 512) * 512
        pieces = triton.cdiv(num_inputs, piece)
    blocks = triton.cdiv(num_tokens, TOKENS)
    (down, up), how = _layouts(), chained(x.device)
    sums = torch.empty(pieces, num_tokens, num_rows, dtype=torch.float32, device=x.device)
    _down_few[(num_slots * num_rows // 16, pieces, blocks)](
        x, x.stride(0), weights.down, sums, sums.stride(0), groups.slots, num_tokens, num_inputs, num_rows, piece,
        TOKENS=TOKENS, num_warps=8, **down, **how,
    )  # fmt: skip
    _up_few[(blocks, len(weights.spans))](
        y, y.stride(0), weights.up, sums, sums.stride(0), weights.spans, groups.slots, num_tokens, num_slots,
        num_outputs, num_rows, PIECES=pieces, RANK=rank, TOKENS=TOKENS, SLOTS=min(SLOTS, num_slots), num_warps=8,
        **up, **how,
    )  # fmt: skip
    return y
