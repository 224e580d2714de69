"""Products of routed experts with many rows each, for Hopper, in Gluon; the plain twin: `experts._grouped`.

Pairs are sorted into blocks of 128 rows of one expert, and the tokens' rows are copied into that order, so that all
operands come by bulk copies, as in `linear_hopper`, whose parts these are; or else the fetching warps gather them. How
many blocks there are is read on the device. Where the second half of a block is padding, as in the last one of every
other expert, it is neither fetched nor multiplied; since tiles then differ in time, programs may draw them from a
counter. Knows no router and no rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .experts import Parts, combine
from .gating import SILU, Biases, Gating, constants
from .gating_hopper import gate_alone, gate_times
from .linear_hopper import (
    BLOCK_K,
    BLOCK_M,
    CHUNK,
    HALF_M,
    HopperTile,
    Ring,
    add_bias,
    add_steps,
    descriptor,
    halves,
    place,
    store,
)
from .linear_invariant import num_multiprocessors
from .routing import Blocks, align, spread

#: Tiles that were drawn and not yet heard of by those who multiply.
_TOLD = gl.constexpr(2)


@dataclass(frozen=True)
class GroupedTile(HopperTile):
    """The tile of both products.

    With `gathers`, the first one fetches rows from where they are, not a copy of them in order. With `draws`, a program
    takes its next tile from a counter, not every so many-th.
    """

    gathers: bool = False
    draws: bool = False


#: What launches take: the fastest on an H200 at 2,048 and at 8,192 tokens.
TILE = GroupedTile(256, 4, gathers=True, draws=True)
#: Other tiles worth a measurement.
CANDIDATES = (
    TILE, GroupedTile(256, 4), GroupedTile(256, 4, draws=True), GroupedTile(256, 4, gathers=True),
    GroupedTile(256, 4, group=8, draws=True), GroupedTile(256, 4, group=32, draws=True),
    GroupedTile(256, 3, 4, draws=True), GroupedTile(128, 6, draws=True),
)  # fmt: skip


class Messages(NamedTuple):
    """Shared memory for numbers of tiles, and barriers: the fetching warps sent one, both warpgroups read it."""

    tiles: Any
    told: Any
    heard: Any


class Shape(NamedTuple):
    """What a kernel is compiled for: the fields of a tile, and what `grouped_product` says of `gated` and `shared`.

    `gathered` rows of tokens are those of `top_k` pairs each. What follows the product is `gating.constants`.
    """

    block_n: int
    stages: int
    parts: int
    group: int
    gated: bool
    gathered: bool
    top_k: int
    draws: bool
    biased: bool
    function: str
    alpha: float
    shift: float
    limit: float


@gluon.jit
def _draw(used, messages, number, total):
    """Draws a tile that no other program has and sends it to the multiplying warpgroups as message `number`.

    Programs begin with one tile each and draw until the `total` tiles are used up. The counter's last value is known;
    the program that draws it resets the counter.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    drawn = gl.atomic_add(used + 1, 1, sem="relaxed")
    if drawn == total - 1:
        gl.store(used + 1, 0)
    tile = drawn + gl.num_programs(0)
    slot = number % _TOLD
    mbarrier.wait(messages.heard.index(slot), ((number // _TOLD) & 1) ^ 1)
    messages.tiles.index(slot).store(gl.full([1], tile, gl.int32, ONE))
    mbarrier.arrive(messages.told.index(slot), count=1)
    return tile


@gluon.jit
def _hear(messages, number):
    """The tile of message number `number`."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = number % _TOLD
    mbarrier.wait(messages.told.index(slot), (number // _TOLD) & 1)
    tile = gl.max(messages.tiles.index(slot).load(ONE), 0)
    mbarrier.arrive(messages.heard.index(slot), count=1)
    return tile


@gluon.jit
def _rows_at(x, slots, pairs, stride_x, TOP_K: gl.constexpr):
    """Where 64 rows begin, and 8 numbers of 64 for each thread of four warps; padding reads the first token's."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    slot = gl.load(slots + gl.arange(0, 64, gl.SliceLayout(1, ROWS)))
    token = gl.where(slot < pairs, slot, 0) // TOP_K
    lane = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    return x + token.to(gl.int64)[:, None] * stride_x + lane[None, :]


@gluon.jit
def _fetch(x, weight, blocks, ring, messages, pairs, column_tiles, steps, size, stride_x, SHAPE: gl.constexpr):
    """The steps of all tiles of the program, as far ahead as the shared memory holds; it takes four warps to gather."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BLOCK_N: gl.constexpr = SHAPE.block_n
    STAGES: gl.constexpr = SHAPE.stages
    GATHERED: gl.constexpr = SHAPE.gathered
    COPIES: gl.constexpr = 2 if SHAPE.gated else 1
    COPIED: gl.constexpr = BLOCK_N // COPIES
    slots, experts, used = blocks
    x_tiles = ring.rows._reinterpret(ring.rows.dtype, [STAGES * 2, 64, 64], KIND)
    weight_parts = ring.weights._reinterpret(ring.weights.dtype, [STAGES * COPIES, COPIED, 64], KIND)
    row_tiles = gl.load(used)
    total = row_tiles * column_tiles
    tile, at, number = gl.program_id(0), 0, 0
    while tile < total:
        row, column = place(tile, row_tiles, column_tiles, SHAPE.group)
        first = gl.load(experts + row) * COPIES * size + column * COPIED
        second = gl.load(slots + row * 128 + 64)
        if GATHERED:
            upper = _rows_at(x, slots + row * 128, pairs, stride_x, SHAPE.top_k)
            lower = _rows_at(x, slots + row * 128 + 64, pairs, stride_x, SHAPE.top_k)
        following = tile + gl.num_programs(0)
        for step in range(steps):
            if SHAPE.draws:
                if step == steps // 2:  # while there is work ahead
                    following = _draw(used, messages, number, total)
            stage = at % STAGES
            now = ring.ready.index(stage)
            mbarrier.wait(ring.free.index(stage), ((at // STAGES) & 1) ^ 1)
            if GATHERED:
                mbarrier.expect(now, BLOCK_N * 64 * 2)
            else:
                mbarrier.expect(now, (128 + BLOCK_N) * 64 * 2, pred=second < pairs)
                mbarrier.expect(now, (64 + BLOCK_N) * 64 * 2, pred=second >= pairs)
                tma.async_copy_global_to_shared(x, [row * 128, step * 64], now, x_tiles.index(stage * 2))
                tma.async_copy_global_to_shared(
                    x, [row * 128 + 64, step * 64], now, x_tiles.index(stage * 2 + 1), pred=second < pairs
                )
            for copy in gl.static_range(COPIES):
                tma.async_copy_global_to_shared(
                    weight, [first + copy * size, step * 64], now, weight_parts.index(stage * COPIES + copy)
                )
            if GATHERED:
                async_copy.async_copy_global_to_shared(x_tiles.index(stage * 2), upper + step * 64)
                if second < pairs:
                    async_copy.async_copy_global_to_shared(x_tiles.index(stage * 2 + 1), lower + step * 64)
                async_copy.mbarrier_arrive(now, increment_count=False)
            at += 1
        tile = following
        number += 1


@gluon.jit
def _finished(acc, bias, first, size, SHAPE: gl.constexpr):
    """The sums of a tile with their biases, from `first` on, which end at `size`, through gate or function."""
    FUNCTION: gl.constexpr = SHAPE.function
    ALPHA: gl.constexpr = SHAPE.alpha
    LIMIT: gl.constexpr = SHAPE.limit
    if SHAPE.gated:
        gate, up = halves(acc, 64, SHAPE.block_n)
        if SHAPE.biased:
            gate = add_bias(gate, bias, first, size)
            up = add_bias(up, bias + size, first, size)
        values = gate_times(gate, up, FUNCTION, ALPHA, SHAPE.shift, LIMIT)
    else:
        values = acc
        if SHAPE.biased:
            values = add_bias(values, bias, first, size)
        if FUNCTION != "":
            values = gate_alone(values, FUNCTION, ALPHA, LIMIT)
    return values


@gluon.jit
def _multiply(
    out, bias, blocks, ring, out_smem, messages, pairs, column_tiles, steps, size,
    HALF: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile of the program, where any of them holds a pair."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BLOCK_N: gl.constexpr = SHAPE.block_n
    STAGES: gl.constexpr = SHAPE.stages
    WIDTH: gl.constexpr = BLOCK_N // 2 if SHAPE.gated else BLOCK_N
    COPIES: gl.constexpr = 2 if SHAPE.gated else 1
    slots, experts, used = blocks
    x_tiles = ring.rows._reinterpret(ring.rows.dtype, [STAGES * 2, 64, 64], KIND)
    weight_tiles = ring.weights._reinterpret(ring.weights.dtype, [STAGES, BLOCK_N, 64], KIND)
    row_tiles = gl.load(used)
    total = row_tiles * column_tiles
    tile, at, number = gl.program_id(0), 0, 0
    while tile < total:
        row, column = place(tile, row_tiles, column_tiles, SHAPE.group)
        if gl.load(slots + row * 128 + HALF * 64) < pairs:
            acc, _ = add_steps(
                x_tiles, weight_tiles, ring.ready, ring.free, at, steps, HALF, BLOCK_N, STAGES, SHAPE.gathered
            )
            own = bias
            if SHAPE.biased:
                own = bias + gl.load(experts + row).to(gl.int64) * COPIES * size
            values = _finished(acc, own, column * WIDTH, size, SHAPE)
            store(values, out, out_smem, row * 128 + HALF * 64, column * WIDTH, 0, WIDTH, HALF, SHAPE.parts)
        else:
            # in step with the fetching warp, so that no phase of `free` ends without the other half
            for step in range(at, at + steps):
                mbarrier.wait(ring.ready.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(ring.free.index(step % STAGES), count=1)
        at += steps
        if SHAPE.draws:
            tile = _hear(messages, number)
        else:
            tile += gl.num_programs(0)
        number += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["pairs", "column_tiles", "steps", "size"])
def _grouped(x, weight, bias, out, blocks, pairs, column_tiles, steps, size, stride_x, SHAPE: gl.constexpr):
    """One program: tiles of the product, as many as are its share or as it draws."""
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BLOCK_N: gl.constexpr = SHAPE.block_n
    STAGES: gl.constexpr = SHAPE.stages
    PARTS: gl.constexpr = SHAPE.parts
    x_smem = gl.allocate_shared_memory(out.dtype, [STAGES * 2, 64, 64], KIND)
    weight_smem = gl.allocate_shared_memory(out.dtype, [STAGES, BLOCK_N, 64], KIND)
    out_smem = gl.allocate_shared_memory(out.dtype, [2 * PARTS, 64, 64], KIND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129 if SHAPE.gathered else 1)
        mbarrier.init(free.index(stage), count=2)
    tiles = gl.allocate_shared_memory(gl.int32, [_TOLD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [_TOLD, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [_TOLD, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(_TOLD):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(heard.index(slot), count=2)
    fence_async_shared()
    ring, messages = Ring(x_smem, weight_smem, ready, free), Messages(tiles, told, heard)
    # a warpgroup that copies takes registers from those that multiply
    WARPS: gl.constexpr = 4 if SHAPE.gathered else 1
    MULTIPLIES: gl.constexpr = 216 if SHAPE.gathered else 232
    FETCHES: gl.constexpr = 64 if SHAPE.gathered else 40
    gl.warp_specialize([
        (_multiply, (out, bias, blocks, ring, out_smem, messages, pairs, column_tiles, steps, size, 0, SHAPE)),
        (_multiply, (out, bias, blocks, ring, out_smem, messages, pairs, column_tiles, steps, size, 1, SHAPE)),
        (_fetch, (x, weight, blocks, ring, messages, pairs, column_tiles, steps, size, stride_x, SHAPE)),
    ], [4, WARPS], [MULTIPLIES, FETCHES])  # fmt: skip


def fused_experts(
    hidden: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor,
    tile: GroupedTile = TILE, first: int = 0, parts: Parts | None = None, gating: Gating | None = None,
    biases: Biases = (None, None),
) -> Tensor:  # fmt: skip
    """As `experts.fused_experts`, for 16-bit types and sizes that are multiples of 8; `tile` changes no bit."""
    held = range(first, first + len(gate_up))
    blocks, gating = align(ids, held, BLOCK_M), gating or SILU
    if tile.gathers and hidden.shape[1] % BLOCK_K == hidden.stride(0) % 16 == hidden.data_ptr() % 16 == 0:
        inner = grouped_product(hidden, gate_up, blocks, tile, gating=gating, shared=ids.shape[1], bias=biases[0])
    else:
        rows = spread(hidden, ids, held, blocks)
        inner = grouped_product(rows, gate_up, blocks, tile, gating=gating, bias=biases[0])
    return combine(grouped_product(inner, down, blocks, tile, bias=biases[1]), weights, ids, held, blocks.places, parts)


def grouped_product(
    x: Tensor, weight: Tensor, blocks: Blocks, tile: GroupedTile = TILE, *, gating: Gating | None = None,
    shared: int = 0, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row i of the result [slots, N] is weight[e] · x[i], e the expert of the block of 128 slots; weight [E, N, K].

    `gating` and `bias` are as in `experts.grouped_product`. With `shared`, row i is of x[pair // shared], the slot's
    pair. Rows that hold no pair mean nothing.
    """
    gated = gating is not None and gating.gated
    rows, depth = blocks.slots.numel(), x.shape[1]
    size, width = (weight.shape[1] // 2, tile.block_n // 2) if gated else (weight.shape[1], tile.block_n)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    column_tiles = triton.cdiv(size, width)
    shape = Shape(
        tile.block_n, tile.stages, min(tile.parts, width // CHUNK), tile.group, gated, shared > 0, shared, tile.draws,
        bias is not None, *constants(gating).values(),
    )  # fmt: skip
    _grouped[(min(rows // BLOCK_M * column_tiles, num_multiprocessors(x.device)),)](
        x if shared else descriptor(x, HALF_M, BLOCK_K), descriptor(weight.flatten(0, 1), width, BLOCK_K),
        blocks.slots if bias is None else bias, descriptor(out, HALF_M, CHUNK),
        (blocks.slots, blocks.experts, blocks.used), blocks.num_pairs, column_tiles,
        triton.cdiv(depth, BLOCK_K), size, x.stride(0), SHAPE=shape, num_warps=4,
    )  # fmt: skip
    return out
