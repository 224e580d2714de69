"""Products of routed experts in Triton; the reference is `fused_experts` of `frame.core.ops.layers`.

A pair is a token and one of its chosen experts, numbered token · top_k + choice. Many pairs: they are sorted by expert
into blocks of equal size on the device (grids come from the token count, so a CUDA graph can hold them), each block is
a matrix product, and a token's results are added in the order of its choices. Few pairs: each is a matrix-vector
product, bound by the bandwidth of the weights. No float atomics; sums are in float32. Many rows of each
expert go through `experts_hopper` on such a chip. Knows no router and no rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .chain import await_previous, chained
from .expert_launch import Chip, Launch, Shape, Tile, invariant_launch, launch_for, many_rows
from .expert_tiles import finish, place, product_of
from .gating import SILU, Biases, Gating, constants, gate_alone, gate_times
from .hopper import hopper_kernel
from .routing import Blocks, align


class Parts(Protocol):
    """The rows of a result in order, and what is called with the result and each part once that is launched."""

    @property
    def rows(self) -> Sequence[slice]:
        """All rows, in order."""

    @property
    def done(self) -> Callable[[Tensor, slice], None]:
        """What is called."""


@triton.jit(do_not_specialize=["pairs"])
def _grouped(
    x, stride_x, weight, bias, out, blocks, pairs, size, depth,
    SHARED: tl.constexpr, GATED: tl.constexpr, SWAP: tl.constexpr, COPIER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    slots, block_experts, num_blocks = blocks
    num_tiles = tl.cdiv(size, BLOCK_N)
    total = tl.load(num_blocks)
    if tl.program_id(0) >= total * num_tiles:
        return
    block, tile = place(tl.program_id(0), total, num_tiles)

    slot = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    some = tl.load(slots + block * BLOCK_M)
    expert = tl.load(block_experts + block).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    # padding reads the block's first row, and columns beyond the matrix what is there: neither is stored
    row = tl.where(slot < pairs, slot, some) // SHARED
    x_at = x + row[:, None] * stride_x + lane[None, :]
    start = expert * (2 if GATED else 1) * size
    if COPIER:
        corner = (start + tile * BLOCK_N).to(tl.int32)
    else:
        line = start + tl.where(column < size, column, 0)
        w_at = weight + line[:, None] * depth + lane[None, :]
        up_at = w_at + tl.cast(size, tl.int64) * depth
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for first in range(0, depth, BLOCK_K):
        kept = (first + lane < depth)[None, :]
        a = tl.load(x_at) if EVEN else tl.load(x_at, mask=kept, other=0.0)
        x_at += BLOCK_K
        if COPIER:
            acc = product_of(a, weight.load([corner, first]), acc, SWAP)
            if GATED:
                acc_up = product_of(a, weight.load([corner + size, first]), acc_up, SWAP)
        else:
            w = tl.load(w_at) if EVEN else tl.load(w_at, mask=kept, other=0.0)
            acc = product_of(a, w, acc, SWAP)
            w_at += BLOCK_K
            if GATED:
                w = tl.load(up_at) if EVEN else tl.load(up_at, mask=kept, other=0.0)
                acc_up = product_of(a, w, acc_up, SWAP)
                up_at += BLOCK_K
    finish(
        acc, acc_up, bias + start, out, slot, pairs, column, size,
        GATED, SWAP, BIASED, FUNCTION, ALPHA, SHIFT, LIMIT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _combine(
    products, weights, ids, places, out, experts, first, size,
    TOP_K: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    token = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(ids + pair) - first
        inside = (expert >= 0) & (expert < experts)
        row = tl.load(places + pair, mask=inside, other=0).to(tl.int64) if PLACED else pair
        value = tl.load(products + row * size + lane, mask=(lane < size) & inside, other=0.0).to(tl.float32)
        total += tl.where(inside, tl.load(weights + pair), 0.0) * value
    tl.store(out + token * size + lane, total.to(out.dtype.element_ty), mask=lane < size)


@triton.jit(do_not_specialize=["first"])
def _vector_gate_up(
    x, weight, bias, ids, out, experts, first, size, stride_x,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
    GATED: tl.constexpr, BIASED: tl.constexpr, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    pair = tl.program_id(1).to(tl.int64)
    expert = (tl.load(ids + pair) - first).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    line = expert * (2 if GATED else 1) * size
    start = weight + line * DEPTH + column[:, None] * DEPTH + lane[None, :]
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = gate
    for at in tl.static_range(0, DEPTH, BLOCK_K):
        kept = (column < size)[:, None] & (at + lane < DEPTH)[None, :]
        gate_weight = tl.load(start + at, mask=kept, other=0.0)
        if GATED:
            up_weight = tl.load(start + size * DEPTH + at, mask=kept, other=0.0)
        value = tl.load(x + pair // TOP_K * stride_x + at + lane, mask=at + lane < DEPTH, other=0.0)
        wide = value.to(tl.float32)[None, :]
        gate += gate_weight.to(tl.float32) * wide
        if GATED:
            up += up_weight.to(tl.float32) * wide
    value = tl.sum(gate, 1)
    if BIASED:
        value += tl.load(bias + line + column, mask=column < size, other=0.0).to(tl.float32)
    if GATED:
        other = tl.sum(up, 1)
        if BIASED:
            other += tl.load(bias + line + size + column, mask=column < size, other=0.0).to(tl.float32)
        value = gate_times(value, other, FUNCTION, ALPHA, SHIFT, LIMIT)
    else:
        value = gate_alone(value, FUNCTION, ALPHA, LIMIT)
    tl.store(out + pair * size + column, value.to(out.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize=["first"])
def _vector_down(
    x, weight, bias, ids, weights, out, experts, first, size,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHAINED: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if BIASED:
        extra = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = (tl.load(ids + pair) - first).to(tl.int64)
        inside = (expert >= 0) & (expert < experts)
        share = tl.where(inside, tl.load(weights + pair), 0.0)
        start = weight + expert * size * DEPTH + column[:, None] * DEPTH + lane[None, :]
        for at in tl.static_range(0, DEPTH, BLOCK_K):
            wanted = (at + lane < DEPTH) & inside
            value = tl.load(x + pair * DEPTH + at + lane, mask=wanted, other=0.0).to(tl.float32)
            w = tl.load(start + at, mask=(column < size)[:, None] & wanted[None, :], other=0.0)
            acc += w.to(tl.float32) * (value * share)[None, :]
        if BIASED:
            own = tl.load(bias + expert * size + column, mask=(column < size) & inside, other=0.0)
            extra += share * own.to(tl.float32)
    total = tl.sum(acc, 1)
    if BIASED:
        total += extra
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def fused_experts(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    launch: Launch | None = None,
    of_all: int = 0,
    first: int = 0,
    parts: Parts | None = None,
    gating: Gating | None = None,
    biases: Biases = (None, None),
) -> Tensor:
    """As `frame.core.ops.layers.fused_experts`; all contiguous but for the tokens of `hidden`.

    `launch` replaces the tile sizes that suit the batch.
    """
    if not hidden.shape[0]:
        return torch.empty_like(hidden)
    if launch is None:
        launch = launch_for(shape_of(down, ids.shape[1], of_all), hidden.shape[0], chip_of(hidden.device))
    inner_bias, outer_bias = biases
    if launch.block_m == 0:
        inner = vector_gate_up(hidden, gate_up, ids, launch.gate_up, first, gating, inner_bias)
        out = vector_down(inner, down, weights, ids, launch.down, first, outer_bias)
        if parts is not None:
            for rows in parts.rows:
                parts.done(out, rows)
        return out
    held = range(first, first + gate_up.shape[0])
    blocks = align(ids, held, launch.block_m)
    inner = grouped_product(
        hidden, gate_up, blocks, launch.gate_up, shared=ids.shape[1], gating=gating or SILU, bias=inner_bias
    )
    products = grouped_product(inner, down, blocks, launch.down, bias=outer_bias)
    return combine(products, weights, ids, held, parts=parts)


def fused_experts_invariant(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, first: int = 0,
    gating: Gating | None = None, biases: Biases = (None, None),
) -> Tensor:  # fmt: skip
    """As `fused_experts`, with one launch for every batch: a token's bits depend on its own row alone."""
    launch = invariant_launch(shape_of(down, ids.shape[1]), chip_of(hidden.device))
    given = hidden, gate_up, down, weights, ids
    return fused_experts(*given, launch=launch, first=first, gating=gating, biases=biases)


def hopper_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, of_all: int = 0, first: int = 0,
    parts: Parts | None = None, gating: Gating | None = None, biases: Biases = (None, None),
) -> Tensor | None:  # fmt: skip
    """`experts_hopper.fused_experts`, or None where there is none or it does not pay."""
    if hidden.device.type != "cuda" or not many_rows(shape_of(down, ids.shape[1], of_all), len(hidden)):
        return None
    if hidden.dtype != gate_up.dtype:
        return None
    product = hopper_kernel(hidden.device, "experts_hopper", "fused_experts")
    if product is None:
        return None
    given = hidden, gate_up, down, weights, ids
    return product(*given, first=first, parts=parts, gating=gating, biases=biases)


def shape_of(down: Tensor, top_k: int, of_all: int = 0) -> Shape:
    """What the tile sizes depend on, from down [E, H, I], E of `of_all` experts that tokens choose from."""
    experts, hidden_size, inner = down.shape
    return Shape(max(experts, of_all), top_k, hidden_size, inner, down.dtype)


def grouped_product(
    x: Tensor, weight: Tensor, blocks: Blocks, tile: Tile, *, shared: int = 1, gating: Gating | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row `pair` of the result [pairs, N] is weight[e] · x[pair // shared], e the pair's expert; weight [E, N, K].

    `bias` [E, N] is added. With a `gating` the result is what it makes of that; for one with a gate, weight [E, 2N, K]
    and bias hold gate and up. Rows of pairs that `blocks` leaves out are not written.
    """
    gated = gating is not None and gating.gated
    size, depth = weight.shape[1] // (2 if gated else 1), weight.shape[2]
    out = torch.empty((blocks.num_pairs, size), dtype=x.dtype, device=x.device)
    most, block_m = blocks.slots.shape
    matrix = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.block_n, tile.block_k]) if tile.copier else weight
    _grouped[(most * triton.cdiv(size, tile.block_n),)](
        x, x.stride(0), matrix, out if bias is None else bias, out, (blocks.slots, blocks.experts, blocks.used),
        blocks.num_pairs, size, depth,
        SHARED=shared, GATED=gated, SWAP=tile.swap, COPIER=tile.copier, EVEN=depth % tile.block_k == 0,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        BIASED=bias is not None, **constants(gating), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def combine(
    products: Tensor,
    weights: Tensor,
    ids: Tensor,
    held: range,
    places: Tensor | None = None,
    parts: Parts | None = None,
) -> Tensor:
    """[T, N]: Σ_k weights[t, k] · products[t · top_k + k], over the ids in `held`, in the order of k.

    With `places`, a pair's products are in that row.
    """
    tokens, top_k = ids.shape
    size = products.shape[1]
    out = torch.empty((tokens, size), dtype=products.dtype, device=products.device)
    block = min(1024, triton.next_power_of_2(size))
    for rows in (slice(0, tokens),) if parts is None else parts.rows:
        pairs = slice(rows.start * top_k, rows.stop * top_k)
        read = products if places is not None else products[pairs]
        _combine[(triton.cdiv(size, block), rows.stop - rows.start)](
            read, weights[rows], ids[rows], None if places is None else places[pairs], out[rows],
            len(held), held.start, size, TOP_K=top_k, PLACED=places is not None, BLOCK=block, **chained(out.device),
        )  # fmt: skip
        if parts is not None:
            parts.done(out, rows)
    return out


def vector_gate_up(
    hidden: Tensor, gate_up: Tensor, ids: Tensor, tile: Tile, first: int = 0, gating: Gating | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate x) · up x of each pair, or another `gating`, [pairs, I]; pairs whose id is outside are not written."""
    gating = gating or SILU
    size, depth = gate_up.shape[1] // (2 if gating.gated else 1), gate_up.shape[2]
    out = torch.empty((ids.numel(), size), dtype=hidden.dtype, device=hidden.device)
    _vector_gate_up[(triton.cdiv(size, tile.block_n), ids.numel())](
        hidden, gate_up, out if bias is None else bias, ids, out, gate_up.shape[0], first, size, hidden.stride(0),
        DEPTH=depth, TOP_K=ids.shape[1], BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        GATED=gating.gated, BIASED=bias is not None, **constants(gating),
        **chained(hidden.device),
    )  # fmt: skip
    return out


def vector_down(
    inner: Tensor, down: Tensor, weights: Tensor, ids: Tensor, tile: Tile, first: int = 0, bias: Tensor | None = None
) -> Tensor:
    """[T, H]: Σ_k weights[t, k] · down[e] inner[t · top_k + k], e = ids[t, k] - first, over those that are inside.

    `bias` [E, H] is added to each product.
    """
    tokens, size = ids.shape[0], down.shape[1]
    out = torch.empty((tokens, size), dtype=inner.dtype, device=inner.device)
    _vector_down[(triton.cdiv(size, tile.block_n), tokens)](
        inner, down, out if bias is None else bias, ids, weights, out, down.shape[0], first, size,
        DEPTH=down.shape[2], TOP_K=ids.shape[1], BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        BIASED=bias is not None,
        **chained(inner.device),
    )  # fmt: skip
    return out


@lru_cache(maxsize=16)
def chip_of(device: torch.device) -> Chip:
    """What tile sizes depend on; a device that is no CUDA chip is any chip."""
    if device.type != "cuda":
        return Chip()
    index = torch.cuda.current_device() if device.index is None else device.index
    shared_bytes = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    copies = torch.cuda.get_device_capability(index) >= (9, 0)
    return Chip(torch.cuda.get_device_name(index), shared_bytes, copies)
