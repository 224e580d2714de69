"""The inside of `prefill`, in Gluon: a warp that fetches tiles of keys and values, and warpgroups that attend to them.

Two warpgroups of 64 queries each share the tiles that the fetching warp brings: by bulk copies, one for each page and
64 features, straight from the paged cache. Each warpgroup overlaps the softmax of one tile with the products of its
neighbours, as FlashAttention-3 does (Shah et al. 2024). Tiles go from the diagonal back to the first key in sight, so
that only the first ones, and with a window the last ones, need a mask. A program that serves several blocks of queries
(`SHAPE.repeated`) counts them in `turn` and their tiles in `begun`, from which the barriers' phases follow. Knows no
row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import barrier
from .prefill_arguments import Tiles


@gluon.jit
def window_tiles(first_pos, num_tiles, TILE: gl.constexpr, WINDOW: gl.constexpr):
    """(first key in sight, its tile, the first tile that all 128 queries from `first_pos` on see all of)."""
    first_key = 0
    first_tile = 0
    first_clear = 0
    if WINDOW > 0:
        first_key = gl.maximum(first_pos - WINDOW + 1, 0)
        first_tile = first_key // TILE
        first_clear = (gl.maximum(first_pos + 128 - WINDOW, 0) + TILE - 1) // TILE
    return first_key, first_tile, first_clear


@gluon.jit
def _cache_row(table, position, first_key, seq_len, row_of_block, SHAPE: gl.constexpr):
    """Where the page at `position` begins; a row outside of the cache, read as zeros, for pages out of sight."""
    there = position < seq_len
    if SHAPE.window > 0:
        there &= position + SHAPE.page > first_key
    block = gl.load(table + position // SHAPE.block_size, mask=there, other=0)
    return gl.where(there, block * row_of_block + position % SHAPE.block_size, 0x7FFF0000)


@gluon.jit
def _copy(source, row, feature, chunk: gl.constexpr, ready, target, SHAPE: gl.constexpr):
    """64 features of some rows of a head; where heads are narrower than tiles, features behind a head are zeros."""
    if SHAPE.head_dim == SHAPE.dim:
        tma.async_copy_global_to_shared(source, [row, feature + chunk * 64], ready, target)
    else:
        tma.async_copy_global_to_shared(source, [row, feature, chunk * 64], ready, target)


@gluon.jit
def _fetch_queries(source, target, row, feature, SHAPE: gl.constexpr):
    CHUNKS: gl.constexpr = SHAPE.dim // 64
    mbarrier.expect(target.ready, 2 * 64 * SHAPE.dim * 2)
    for half in gl.static_range(2):
        for chunk in gl.static_range(CHUNKS):
            place = target.memory.index(half * CHUNKS + chunk)
            _copy(source, row + half * 64, feature, chunk, target.ready, place, SHAPE)


@gluon.jit
def _fetch_tile(source, target, table, position, feature, first_key, seq_len, row_of_block, at, SHAPE: gl.constexpr):
    """Keys or values from `position` on, into the place of tile `at` once it is free."""
    PAGES: gl.constexpr = SHAPE.tile // SHAPE.page
    CHUNKS: gl.constexpr = SHAPE.dim // 64
    stage = at % SHAPE.num_stages
    ready = target.ready.index(stage)
    mbarrier.wait(target.free.index(stage), ((at // SHAPE.num_stages) & 1) ^ 1)
    mbarrier.expect(ready, SHAPE.tile * SHAPE.dim * 2)
    for page in gl.static_range(PAGES):
        row = _cache_row(table, position + page * SHAPE.page, first_key, seq_len, row_of_block, SHAPE)
        for chunk in gl.static_range(CHUNKS):
            place = target.memory.index((stage * CHUNKS + chunk) * PAGES + page)
            _copy(source, row, feature, chunk, ready, place, SHAPE)


@gluon.jit
def fetch(
    query_source, key_source, value_source, queries, keys, values, block, table, row_of_block, query_feature, feature,
    turn, begun, SHAPE: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the queries of `block` once, then keys and values by tile, from the last one to the first."""
    first_key, first_tile, _ = window_tiles(block.first_pos, block.num_tiles, SHAPE.tile, SHAPE.window)
    if not SHAPE.repeated:
        _fetch_queries(query_source, queries, block.out_row, query_feature, SHAPE)
    for step in range(block.num_tiles - first_tile):
        position = (block.num_tiles - 1 - step) * SHAPE.tile
        _fetch_tile(
            key_source, keys, table, position, feature, first_key, block.seq_len, row_of_block, begun + step, SHAPE
        )
        if SHAPE.repeated and step == 0:
            # the first keys are fetched while the queries before are still in use
            mbarrier.wait(queries.free, (turn & 1) ^ 1)
            _fetch_queries(query_source, queries, block.out_row, query_feature, SHAPE)
        _fetch_tile(
            value_source, values, table, position, feature, first_key, block.seq_len, row_of_block, begun + step, SHAPE
        )


@gluon.jit
def _clear_tail(values, valid, stage, PAGE: gl.constexpr, CHUNKS: gl.constexpr, PAGES: gl.constexpr):
    """Zeros the values behind the first `valid` keys of a tile, within the page where those end.

    What ended requests left there may not be finite, and no weight hides that. Both warpgroups may do it at once.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    page = (valid - 1) // PAGE
    kept = gl.arange(0, PAGE, gl.SliceLayout(1, COPY)) < valid - page * PAGE
    for chunk in gl.static_range(CHUNKS):
        part = values.index((stage * CHUNKS + chunk) * PAGES + page)
        part.store(gl.where(kept[:, None], part.load(COPY), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _tanh(x):
    """The processor's own: within 2^-11 of the value, less than the rounding of 16-bit queries and keys."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _hide(score, position, query_pos, WINDOW: gl.constexpr):
    """Minus infinity where a query does not see a key, else the score.

    In assembly: LLVM packs the comparisons of a tile into bits and unpacks each, which is slow to compile and to run.
    """
    last = query_pos[:, None]
    if WINDOW > 0:
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.le.s32 p, $2, $3; setp.gt.and.s32 p, $2, $4, p; selp.f32 $0, $1, 0fFF800000, p; }",
            "=f,f,r,r,r", [score, position[None, :], last, last - WINDOW], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [score, position[None, :], last], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _weigh(score, peak, total, position, query_pos, scales, MASKED: gl.constexpr, SHAPE: gl.constexpr):
    """Softmax of one tile against what came before: (weights, new peak, new total, factor for what came before)."""
    scale, squash = scales
    if SHAPE.soft_cap:
        score = _tanh(score * squash)
    if MASKED:
        score = _hide(score, position, query_pos, SHAPE.window)
    new_peak = gl.maximum(peak, gl.max(score, 1))
    base = new_peak * scale
    if MASKED:
        base = gl.where(new_peak == float("-inf"), 0.0, base)
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(peak * scale - base)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _begin_scores(at, query, keys, SHAPE: gl.constexpr, SCORES: gl.constexpr):
    """The scores of tile `at`, once it is there; to be waited for."""
    stage = at % SHAPE.num_stages
    mbarrier.wait(keys.ready.index(stage), (at // SHAPE.num_stages) & 1)
    TILE: gl.constexpr = SHAPE.tile
    empty = gl.zeros([64, TILE], gl.float32, SCORES)
    return warpgroup_mma(query, keys.memory.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _advance(
    step, acc, weight, peak, total, query, keys, values, query_pos, num_tiles, begun, scales,
    MASKED: gl.constexpr, SHAPE: gl.constexpr, SCORES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Scores of tile `step` while the values of the tile before are added; then the softmax of its scores."""
    at = begun + step
    stage = at % SHAPE.num_stages
    before = (at - 1) % SHAPE.num_stages
    scores = _begin_scores(at, query, keys, SHAPE, SCORES)
    mbarrier.wait(values.ready.index(before), ((at - 1) // SHAPE.num_stages) & 1)
    sums = warpgroup_mma(weight, values.memory.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(keys.free.index(stage), count=1)
    position = (num_tiles - 1 - step) * SHAPE.tile + gl.arange(0, SHAPE.tile, gl.SliceLayout(0, SCORES))
    new, peak, total, shrink = _weigh(score, peak, total, position, query_pos, scales, MASKED, SHAPE)
    acc, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    mbarrier.arrive(values.free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(new.to(query.dtype), OPERAND), peak, total


@gluon.jit
def _add(at, acc, weight, values, SHAPE: gl.constexpr):
    """The weighted values of tile `at` on top of `acc`."""
    stage = at % SHAPE.num_stages
    mbarrier.wait(values.ready.index(stage), (at // SHAPE.num_stages) & 1)
    sums = warpgroup_mma(weight, values.memory.index(stage), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums, weight])


@gluon.jit
def attend(out, queries, keys, values, sink, block, stride_out, scales, turn, begun, half, SHAPE: gl.constexpr):
    """One warpgroup: 64 queries of `block` over all tiles in sight."""
    DIM: gl.constexpr = SHAPE.dim
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    PAGE: gl.constexpr = SHAPE.page
    TILE: gl.constexpr = SHAPE.tile
    NUM_STAGES: gl.constexpr = SHAPE.num_stages
    WINDOW: gl.constexpr = SHAPE.window
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = NUM_STAGES * (DIM // 64) * (TILE // PAGE)
    num_tiles, num_masked = block.num_tiles, block.num_masked
    _, first_tile, first_clear = window_tiles(block.first_pos, num_tiles, TILE, WINDOW)
    num_clear = num_tiles - first_clear
    lane = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_pos = block.first_pos + lane
    query = queries.memory._reinterpret(queries.memory.dtype, [2, 64, DIM], KIND).index(half)
    key_tiles = Tiles(keys.memory._reinterpret(keys.memory.dtype, [NUM_STAGES, TILE, DIM], KIND), keys.ready, keys.free)
    value_tiles = Tiles(
        values.memory._reinterpret(values.memory.dtype, [NUM_STAGES, TILE, DIM], KIND), values.ready, values.free
    )
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, DIM], gl.float32, SUMS)
    weight = gl.zeros([64, TILE], query.dtype, OPERAND)
    valid = block.seq_len - (num_tiles - 1) * TILE
    mbarrier.wait(queries.ready, turn & 1)
    for step in range(gl.maximum(num_masked, 1)):
        if step > 0:
            acc, weight = _add(begun + step - 1, acc, weight, value_tiles, SHAPE)
            mbarrier.arrive(values.free.index((begun + step - 1) % NUM_STAGES), count=1)
        at = begun + step
        stage = at % NUM_STAGES
        scores = _begin_scores(at, query, key_tiles, SHAPE, SCORES)
        score = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys.free.index(stage), count=1)
        position = (num_tiles - 1 - step) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        new, peak, total, shrink = _weigh(score, peak, total, position, query_pos, scales, True, SHAPE)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weight = gl.convert_layout(new.to(query.dtype), OPERAND)
        if step == 0 and valid % PAGE != 0 and valid < TILE:
            mbarrier.wait(values.ready.index(stage), (begun // NUM_STAGES) & 1)
            pages = values.memory
            if HEAD_DIM != DIM:
                pages = values.memory._reinterpret(values.memory.dtype, [PARTS, PAGE, 64], KIND)
            _clear_tail(pages, valid, stage, PAGE, DIM // 64, TILE // PAGE)
    for step in range(gl.maximum(num_masked, 1), num_clear):
        acc, weight, peak, total = _advance(
            step, acc, weight, peak, total, query, key_tiles, value_tiles, query_pos, num_tiles, begun, scales,
            False, SHAPE, SCORES, OPERAND,
        )  # fmt: skip
    if WINDOW > 0:
        for step in range(gl.maximum(gl.maximum(num_masked, 1), num_clear), num_tiles - first_tile):
            acc, weight, peak, total = _advance(
                step, acc, weight, peak, total, query, key_tiles, value_tiles, query_pos, num_tiles, begun, scales,
                True, SHAPE, SCORES, OPERAND,
            )  # fmt: skip
    last = begun + num_tiles - first_tile - 1
    if SHAPE.repeated:
        mbarrier.arrive(queries.free, count=1)
    acc, weight = _add(last, acc, weight, value_tiles, SHAPE)
    if SHAPE.repeated:
        mbarrier.arrive(values.free.index(last % NUM_STAGES), count=1)
    if SHAPE.sinks:
        total += gl.exp2(gl.load(sink).to(gl.float32) * 1.4426950408889634 - peak * scales[0])
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
    token = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    place = (block.out_row + token).to(gl.int64) * stride_out
    real = (block.first_token + token < block.query_len)[:, None]
    if HEAD_DIM != DIM:
        real = real & (dim < HEAD_DIM)[None, :]
    gl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=real)
