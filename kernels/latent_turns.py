"""`latent_few` for many short rows, in Gluon: programs that serve parts of rows in turn; its plain twin is the same.

There is one program for each multiprocessor. The fetching warp chooses the parts, tells the warpgroups of them, and
goes on with the next one's queries and tiles while they end the one before. So places and their barriers are counted
over all parts of a program. The numbers of a row are those of `latent_few`, bit by bit. Knows no layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .attention import LOG2E
from .barriers import barrier
from .chain import await_previous, chained
from .latent_columns import Found, Place, find, leave, store_joined, take
from .latent_copies import Sources, fetch_queries, fetch_tile, sources_of, tile_layout
from .latent_decode import LatentRows, part_of_row
from .latent_tiles import Memory, Part, barriers_of, leave_empty, store_latent
from .linear_invariant import num_multiprocessors


class Told(NamedTuple):
    """What the fetching warp says of a part, beside its queries: its number, and how many tokens it has (0: the end).

    Each int32 [2, 1].
    """

    items: Any
    tokens: Any


class Left(NamedTuple):
    """What the second warpgroup leaves for the first, as `leave` stores it, and barriers: it is there, it was read."""

    sums: Any
    sizes: Any
    there: Any
    free: Any


class Work(NamedTuple):
    """All parts: how many they are, those of a group of 16 heads, the groups of a row, and all its heads."""

    items: Any
    splits: Any
    groups: Any
    heads: Any


class Written(NamedTuple):
    """What a step brings, and where it goes: sums and log-sum-exps, latents with their stride, their slots, the cache.

    `row_of_block` is as in the cache's copies.
    """

    out: Any
    lse: Any
    latent: Any
    stride_latent: Any
    slots: Any
    cache: Any
    row_of_block: Any


@gluon.jit
def _heads_of(item, work):
    """(Split, row, first head of all rows' heads, number of heads) of a part."""
    split, group = item % work.splits, item // work.splits % work.groups
    row = (item // work.splits // work.groups).to(gl.int64)
    return split, row, row * work.heads + group * 16, gl.minimum(work.heads - group * 16, 16)


@gluon.jit
def _row_of(rows, item, work):
    """(Length, row of the block table) of the row of a part; zeros behind the last one."""
    row, there = item // work.splits // work.groups, item < work.items
    return gl.load(rows.seq_lens + row, mask=there, other=0), gl.load(rows.table_rows + row, mask=there, other=0)


@gluon.jit
def _tell(queries, told, turn, item, num_tokens):
    """Says what turn `turn` is, when its place for queries is free; what signals the queries makes it known."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn % 2
    mbarrier.wait(queries.free.index(place), ((turn // 2) & 1) ^ 1)
    told.items.index(place).store(gl.full([1], item, gl.int32, ONE))
    told.tokens.index(place).store(gl.full([1], num_tokens, gl.int32, ONE))
    barrier()


@gluon.jit
def _hear(queries, told, turn):
    """(Part, its tokens) of turn `turn`, whose queries are there."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place = turn % 2
    mbarrier.wait(queries.ready.index(place), (turn // 2) & 1)
    return gl.max(told.items.index(place).load(ONE), 0), gl.max(told.tokens.index(place).load(ONE), 0)


@gluon.jit
def _following(counter, item, items, DRAWS: gl.constexpr):
    """The part behind part `item`: one that the program draws, or the next of its share.

    Each part that is served draws once, so the last number is known; the program that draws it resets the counter.
    """
    if DRAWS:
        drawn = gl.atomic_add(counter, 1, sem="relaxed")
        if drawn == items - 1:
            gl.store(counter, 0)
        item = drawn
    return item + gl.num_programs(0)


@gluon.jit
def _fetch(
    sources, queries, told, tiles, rows, work, written, counter,
    BLOCK: gl.constexpr, SPLIT: gl.constexpr, LINE: gl.constexpr, DRAWS: gl.constexpr,
):  # fmt: skip
    """The fetching warp: chooses parts and fetches their queries and tiles, as far ahead as there are places."""
    item, turn, begun = gl.program_id(0), 0, 0
    seq_len, table_row = _row_of(rows, item, work)
    while item < work.items:
        split, row, first_head, real_heads = _heads_of(item, work)
        low, high = part_of_row(seq_len, split, work.splits, 64)
        part = Part(low, high, rows.block_table + table_row.to(gl.int64) * rows.stride_table)
        if low >= high:
            leave_empty(written.out, written.lse, first_head, real_heads, split, work.splits, SPLIT, LINE)
            item = _following(counter, item, work.items, DRAWS)
            seq_len, table_row = _row_of(rows, item, work)
        else:
            newest = gl.load(written.slots + row, mask=high == seq_len, other=-1)
            _tell(queries, told, turn, item, high - low)
            fetch_queries(sources, queries, turn % 2, first_head.to(gl.int32))
            steps = (high - low + 63) // 64
            for step in range(steps):
                if (step == steps - 1) & (newest >= 0):  # this tile has the newest token, which is stored first
                    place = (newest // BLOCK * written.row_of_block + newest % BLOCK) * 576
                    store_latent(written.cache, written.latent + row * written.stride_latent, place, place + 512, LINE)
                fetch_tile(sources, tiles, part, step, begun + step, written.row_of_block, BLOCK)
                if step == steps // 2:  # what the next part needs to begin is read while there is work ahead
                    item = _following(counter, item, work.items, DRAWS)
                    seq_len, table_row = _row_of(rows, item, work)
            turn += 1
            begun += steps
    _tell(queries, told, turn, 0, 0)
    mbarrier.arrive(queries.ready.index(turn % 2), count=1)


@gluon.jit
def _second(
    queries, told, tiles, weights, left, scale, which,
    KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that leaves its sums for the other."""
    turn, begun = 0, 0
    _, num_tokens = _hear(queries, told, turn)
    while num_tokens > 0:
        found = find(queries, tiles, weights, turn, begun, num_tokens, scale, which, KIND, LATENTS, NUMBERS)
        barrier()
        mbarrier.arrive(queries.free.index(turn % 2), count=1)
        mbarrier.wait(left.free, (turn & 1) ^ 1)
        leave(found, left.sums, left.sizes)
        mbarrier.arrive(left.there, count=1)
        begun += (num_tokens + 63) // 64
        turn += 1
        _, num_tokens = _hear(queries, told, turn)


@gluon.jit
def _in_order(own, other, turned):
    """What was found in a part's even tiles and in its odd ones: the order of a sum shows in its last bit."""
    even = Found(
        gl.where(turned, other.acc, own.acc), gl.where(turned, other.peak, own.peak),
        gl.where(turned, other.total, own.total),
    )  # fmt: skip
    odd = Found(
        gl.where(turned, own.acc, other.acc), gl.where(turned, own.peak, other.peak),
        gl.where(turned, own.total, other.total),
    )  # fmt: skip
    return even, odd


@gluon.jit
def _first(
    queries, told, tiles, weights, left, scale, which, out, lse, work,
    SPLIT: gl.constexpr, KIND: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that joins the sums of both."""
    turn, begun = 0, 0
    item, num_tokens = _hear(queries, told, turn)
    while num_tokens > 0:
        own = find(queries, tiles, weights, turn, begun, num_tokens, scale, which, KIND, LATENTS, NUMBERS)
        barrier()
        mbarrier.arrive(queries.free.index(turn % 2), count=1)
        mbarrier.wait(left.there, turn & 1)
        other = take(left.sums, left.sizes, KIND)
        barrier()
        mbarrier.arrive(left.free, count=1)
        even, odd = _in_order(own, other, begun % 2 == 1)
        split, _, first_head, real_heads = _heads_of(item, work)
        place = Place(
            out + (first_head * work.splits + split) * 512, lse + first_head * work.splits + split,
            work.splits * 512, work.splits,
        )  # fmt: skip
        store_joined(even, odd, scale, place, real_heads, SPLIT, KIND)
        begun += (num_tokens + 63) // 64
        turn += 1
        item, num_tokens = _hear(queries, told, turn)


@gluon.jit(do_not_specialize=["items"], do_not_specialize_on_alignment=["slots", "splits", "heads"])
def _latent_turns(
    out, lse, query, query_turned, lines, lines_turned, latent, cache, slots, rows, scale, items, splits, heads,
    row_of_block, stride_latent, counter,
    BLOCK: gl.constexpr, SPLIT: gl.constexpr, LINE: gl.constexpr, LATENTS: gl.constexpr, NUMBERS: gl.constexpr,
    DRAWS: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """One program: parts of rows, each of 16 heads of a row, as many as are its share or as it draws."""
    await_previous(CHAINED, LONG=True)
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CHUNKS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KIND: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    dtype: gl.constexpr = cache.dtype.element_ty
    queries = Memory(
        gl.allocate_shared_memory(dtype, [2, 8, 16, 64], CHUNKS),
        gl.allocate_shared_memory(dtype, [2, 16, 64], LINES), barriers_of([2, 1]), barriers_of([2, 1]),
    )  # fmt: skip
    tiles = Memory(
        gl.allocate_shared_memory(dtype, [16, 8, 8, 64], CHUNKS),
        gl.allocate_shared_memory(dtype, [8, 16, 64], LINES), barriers_of([2, 1]), barriers_of([2, 1]),
    )  # fmt: skip
    weights = gl.allocate_shared_memory(dtype, [2, 16, 64], LINES)
    left = Left(
        gl.allocate_shared_memory(gl.float32, [512, 16], PLAIN), gl.allocate_shared_memory(gl.float32, [2, 16], FLAT),
        barriers_of([1]), barriers_of([1]),
    )  # fmt: skip
    told = Told(gl.allocate_shared_memory(gl.int32, [2, 1], FLAT), gl.allocate_shared_memory(gl.int32, [2, 1], FLAT))
    mbarrier.init(left.there, count=1)
    mbarrier.init(left.free, count=1)
    for stage in gl.static_range(2):
        mbarrier.init(queries.ready.index(stage), count=1)
        mbarrier.init(queries.free.index(stage), count=2)
        mbarrier.init(tiles.ready.index(stage), count=1)
        mbarrier.init(tiles.free.index(stage), count=1)
    fence_async_shared()
    work = Work(items, splits, (heads + 15) // 16, heads)
    # as values and not as constants, so that what both warpgroups do is traced once
    first, second = gl.to_tensor(0), gl.to_tensor(1)
    gl.warp_specialize([
        (_first, (queries, told, tiles, weights, left, scale, first, out, lse, work, SPLIT, KIND, LATENTS, NUMBERS)),
        (_second, (queries, told, tiles, weights, left, scale, second, KIND, LATENTS, NUMBERS)),
        (_fetch, (
            Sources(query, query_turned, lines, lines_turned), queries, told, tiles, rows, work,
            Written(out, lse, latent, stride_latent, slots, cache, row_of_block), counter, BLOCK, SPLIT, LINE, DRAWS,
        )),
    ], [4, 1], [192, 112])  # fmt: skip


@lru_cache(maxsize=16)
def counter(device: torch.device) -> Tensor:
    """A zero int32 [1] that stays on the device: parts that the programs of a launch drew, which leave it as zero."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def launch(
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    rows: LatentRows,
    *,
    scale: float,
    splits: int,
    draws: bool,
) -> None:
    """Fills `out` and `lse`, as `latent_decode.room_for_parts` makes them, for `latent_few.latent_decode`'s tensors.

    With `draws`, programs draw their parts one after another from a counter of the device, whose launches then must
    follow one another; else each has every n-th. It changes no bit.
    """
    count, heads, width = query.shape
    items, row_of_block = count * triton.cdiv(heads, 16) * splits, kv_cache.stride(0) // width
    _latent_turns[(min(items, num_multiprocessors(query.device)),)](
        out, lse, *sources_of(query, kv_cache), latent, kv_cache, slots, rows, scale * LOG2E.value, items, splits,
        heads, row_of_block, latent.stride(0), counter(query.device), BLOCK=kv_cache.shape[1], SPLIT=splits > 1,
        LINE=gl.BlockedLayout([8], [32], [1], [0]), LATENTS=tile_layout(0), NUMBERS=tile_layout(1), DRAWS=draws,
        num_warps=4, **chained(query.device),
    )  # fmt: skip
