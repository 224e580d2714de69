"""Parts of the kernels that multiply the blocks of experts, whatever their weights are; for `experts` and others."""

from __future__ import annotations

import triton
import triton.language as tl

from .gating import gate_alone, gate_times

_GROUP = tl.constexpr(8)  # blocks that share a weight tile while it is in the L2 cache


@triton.jit
def place(program, total, num_tiles):
    """(block, tile) of a program, of which `total` blocks have `num_tiles` each.

    Neighbours take the blocks of a group first, so that the blocks of one expert meet the same weights in the cache.
    """
    group = program // (_GROUP * num_tiles)
    rows = tl.minimum(total - group * _GROUP, _GROUP)
    block = group * _GROUP + program % (_GROUP * num_tiles) % rows
    return block, program % (_GROUP * num_tiles) // rows


@triton.jit
def finish(
    acc, acc_up, bias, out, slot, pairs, column, size,
    GATED: tl.constexpr, SWAP: tl.constexpr, BIASED: tl.constexpr,
    FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Stores the sums of a tile for the pairs of `slot`, with their biases and through what a gating makes of them.

    `bias` is the expert's; sums are [slots, columns], or their transpose if they SWAP.
    """
    if BIASED:
        own = tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)
        acc += own[:, None] if SWAP else own[None, :]
        if GATED:
            own = tl.load(bias + size + column, mask=column < size, other=0.0).to(tl.float32)
            acc_up += own[:, None] if SWAP else own[None, :]
    if GATED:
        acc = gate_times(acc, acc_up, FUNCTION, ALPHA, SHIFT, LIMIT)
    elif FUNCTION != "":
        acc = gate_alone(acc, FUNCTION, ALPHA, LIMIT)
    if SWAP:
        at, kept = slot[None, :] * size + column[:, None], (slot < pairs)[None, :] & (column < size)[:, None]
    else:
        at, kept = slot[:, None] * size + column[None, :], (slot < pairs)[:, None] & (column < size)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=kept)


@triton.jit
def product_of(a, w, acc, SWAP: tl.constexpr):
    """acc + a wᵀ, or its transpose."""
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc
