"""The inside of `prefill`, in Gluon: a warp that fetches tiles of keys and values, and warpgroups that attend to them.

Two warpgroups of 64 queries each share the tiles that the fetching warp brings: by bulk copies, one for each page and
64 features, straight from the paged cache. Each warpgroup overlaps the softmax of one tile with the products of its
neighbours, as FlashAttention-3 does (Shah et al. 2024). Tiles go from the diagonal back to the first key in sight, so
that only the first ones, and with a window the last ones, need a mask. A program that serves several blocks of queries
(`REPEATED`) counts them in `turn` and their tiles in `begun`, from which the barriers' phases follow. Knows no row.
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
def _cache_row(table, position, first_key, seq_len, row_of_block, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
               WINDOW: gl.constexpr):  # fmt: skip
    """Where the page at `position` begins; a row outside of the cache, read as zeros, for pages out of sight."""
    there = position < seq_len
    if WINDOW > 0:
        there &= position + PAGE > first_key
    block = gl.load(table + position // BLOCK_SIZE, mask=there, other=0)
    return gl.where(there, block * row_of_block + position % BLOCK_SIZE, 0x7FFF0000)


@gluon.jit
def _copy(source, row, feature, chunk: gl.constexpr, ready, target, DIM: gl.constexpr, HEAD_DIM: gl.constexpr):
    """64 features of some rows of a head; where heads are narrower than tiles, features behind a head are zeros."""
    if HEAD_DIM == DIM:
        tma.async_copy_global_to_shared(source, [row, feature + chunk * 64], ready, target)
    else:
        tma.async_copy_global_to_shared(source, [row, feature, chunk * 64], ready, target)


@gluon.jit
def _fetch_queries(query, smem, ready, row, feature, DIM: gl.constexpr, HEAD_DIM: gl.constexpr):
    CHUNKS: gl.constexpr = DIM // 64
    mbarrier.expect(ready, 2 * 64 * DIM * 2)
    for half in gl.static_range(2):
        for chunk in gl.static_range(CHUNKS):
            _copy(query, row + half * 64, feature, chunk, ready, smem.index(half * CHUNKS + chunk), DIM, HEAD_DIM)


@gluon.jit
def _fetch_tile(
    source, smem, ready, free, table, position, feature, first_key, seq_len, row_of_block, at,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Keys or values from `position` on, into the place of tile `at` once it is free."""
    PAGES: gl.constexpr = TILE // PAGE
    CHUNKS: gl.constexpr = DIM // 64
    stage = at % NUM_STAGES
    mbarrier.wait(free.index(stage), ((at // NUM_STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), TILE * DIM * 2)
    for page in gl.static_range(PAGES):
        row = _cache_row(table, position + page * PAGE, first_key, seq_len, row_of_block, BLOCK_SIZE, PAGE, WINDOW)
        for chunk in gl.static_range(CHUNKS):
            place = smem.index((stage * CHUNKS + chunk) * PAGES + page)
            _copy(source, row, feature, chunk, ready.index(stage), place, DIM, HEAD_DIM)


@gluon.jit
def fetch(
    keys, values, query, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready,
    value_free, table, row_of_block, query_row, query_feature, feature, first_pos, num_tiles, seq_len, turn, begun,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, REPEATED: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the queries once, then keys and values tile by tile, from the last one to the first."""
    first_key, first_tile, _ = window_tiles(first_pos, num_tiles, TILE, WINDOW)
    if not REPEATED:
        _fetch_queries(query, query_smem, query_ready, query_row, query_feature, DIM, HEAD_DIM)
    for step in range(num_tiles - first_tile):
        position = (num_tiles - 1 - step) * TILE
        _fetch_tile(
            keys, key_smem, key_ready, key_free, table, position, feature, first_key, seq_len, row_of_block,
            begun + step, BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW,
        )  # fmt: skip
        if REPEATED and step == 0:
            # the first keys came while the queries before were still in use
            mbarrier.wait(query_free, (turn & 1) ^ 1)
            _fetch_queries(query, query_smem, query_ready, query_row, query_feature, DIM, HEAD_DIM)
        _fetch_tile(
            values, value_smem, value_ready, value_free, table, position, feature, first_key, seq_len, row_of_block,
            begun + step, BLOCK_SIZE, PAGE, TILE, NUM_STAGES, DIM, HEAD_DIM, WINDOW,
        )  # fmt: skip


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
def _weigh(
    score, peak, total, position, query_pos, scale, squash,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """Softmax of one tile against what came before: (weights, new peak, new total, factor for what came before)."""
    if SOFT_CAP:
        score = _tanh(score * squash)
    if MASKED:
        score = _hide(score, position, query_pos, WINDOW)
    new_peak = gl.maximum(peak, gl.max(score, 1))
    base = new_peak * scale
    if MASKED:
        base = gl.where(new_peak == float("-inf"), 0.0, base)
    weight = gl.exp2(score * scale - base[:, None])
    shrink = gl.exp2(peak * scale - base)
    return weight, new_peak, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _begin_scores(at, query, key_smem, key_ready, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, SCORES: gl.constexpr):
    """The scores of tile `at`, once it is there; to be waited for."""
    stage = at % NUM_STAGES
    mbarrier.wait(key_ready.index(stage), (at // NUM_STAGES) & 1)
    empty = gl.zeros([64, TILE], gl.float32, SCORES)
    return warpgroup_mma(query, key_smem.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _advance(
    step, acc, weight, peak, total, query, key_smem, value_smem, key_ready, key_free, value_ready, value_free,
    query_pos, num_tiles, begun, scale, squash,
    MASKED: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, SCORES: gl.constexpr, OPERAND: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """Scores of tile `step` while the values of the tile before are added; then the softmax of its scores."""
    at = begun + step
    stage = at % NUM_STAGES
    before = (at - 1) % NUM_STAGES
    scores = _begin_scores(at, query, key_smem, key_ready, TILE, NUM_STAGES, SCORES)
    mbarrier.wait(value_ready.index(before), ((at - 1) // NUM_STAGES) & 1)
    sums = warpgroup_mma(weight, value_smem.index(before), acc, is_async=True)
    score = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(key_free.index(stage), count=1)
    position = (num_tiles - 1 - step) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    new, peak, total, shrink = _weigh(score, peak, total, position, query_pos, scale, squash, MASKED, WINDOW, SOFT_CAP)
    acc, weight = warpgroup_mma_wait(0, deps=[sums, weight])
    mbarrier.arrive(value_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(new.to(query.dtype), OPERAND), peak, total


@gluon.jit
def _add(at, acc, weight, value_smem, value_ready, NUM_STAGES: gl.constexpr):
    """The weighted values of tile `at` on top of `acc`."""
    stage = at % NUM_STAGES
    mbarrier.wait(value_ready.index(stage), (at // NUM_STAGES) & 1)
    sums = warpgroup_mma(weight, value_smem.index(stage), acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[sums, weight])


@gluon.jit
def attend(
    out, query_smem, key_smem, value_smem, query_ready, query_free, key_ready, key_free, value_ready, value_free,
    sink, first_token, first_pos, query_len, seq_len, out_row, stride_out, num_tiles, num_masked, scale, squash, turn,
    begun,
    half, PAGE: gl.constexpr, TILE: gl.constexpr, NUM_STAGES: gl.constexpr, DIM: gl.constexpr,
    HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr, SINKS: gl.constexpr, REPEATED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries over all tiles in sight, of which the first `num_masked` reach the diagonal."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    KIND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = NUM_STAGES * (DIM // 64) * (TILE // PAGE)
    _, first_tile, first_clear = window_tiles(first_pos, num_tiles, TILE, WINDOW)
    num_clear = num_tiles - first_clear
    lane = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    query_pos = first_pos + lane
    queries = query_smem._reinterpret(query_smem.dtype, [2, 64, DIM], KIND).index(half)
    key_tiles = key_smem._reinterpret(key_smem.dtype, [NUM_STAGES, TILE, DIM], KIND)
    value_tiles = value_smem._reinterpret(value_smem.dtype, [NUM_STAGES, TILE, DIM], KIND)
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, DIM], gl.float32, SUMS)
    weight = gl.zeros([64, TILE], queries.dtype, OPERAND)
    valid = seq_len - (num_tiles - 1) * TILE
    mbarrier.wait(query_ready, turn & 1)
    for step in range(gl.maximum(num_masked, 1)):
        if step > 0:
            acc, weight = _add(begun + step - 1, acc, weight, value_tiles, value_ready, NUM_STAGES)
            mbarrier.arrive(value_free.index((begun + step - 1) % NUM_STAGES), count=1)
        at = begun + step
        stage = at % NUM_STAGES
        scores = _begin_scores(at, queries, key_tiles, key_ready, TILE, NUM_STAGES, SCORES)
        score = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        position = (num_tiles - 1 - step) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        new, peak, total, shrink = _weigh(
            score, peak, total, position, query_pos, scale, squash, True, WINDOW, SOFT_CAP
        )
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        weight = gl.convert_layout(new.to(queries.dtype), OPERAND)
        if step == 0 and valid % PAGE != 0 and valid < TILE:
            mbarrier.wait(value_ready.index(stage), (begun // NUM_STAGES) & 1)
            pages = value_smem
            if HEAD_DIM != DIM:
                pages = value_smem._reinterpret(value_smem.dtype, [PARTS, PAGE, 64], KIND)
            _clear_tail(pages, valid, stage, PAGE, DIM // 64, TILE // PAGE)
    for step in range(gl.maximum(num_masked, 1), num_clear):
        acc, weight, peak, total = _advance(
            step, acc, weight, peak, total, queries, key_tiles, value_tiles, key_ready, key_free, value_ready,
            value_free, query_pos, num_tiles, begun, scale, squash, False, TILE, NUM_STAGES, SCORES, OPERAND, WINDOW,
            SOFT_CAP,
        )  # fmt: skip
    if WINDOW > 0:
        for step in range(gl.maximum(gl.maximum(num_masked, 1), num_clear), num_tiles - first_tile):
            acc, weight, peak, total = _advance(
                step, acc, weight, peak, total, queries, key_tiles, value_tiles, key_ready, key_free, value_ready,
                value_free, query_pos, num_tiles, begun, scale, squash, True, TILE, NUM_STAGES, SCORES, OPERAND,
                WINDOW, SOFT_CAP,
            )  # fmt: skip
    last = begun + num_tiles - first_tile - 1
    if REPEATED:
        mbarrier.arrive(query_free, count=1)
    acc, weight = _add(last, acc, weight, value_tiles, value_ready, NUM_STAGES)
    if REPEATED:
        mbarrier.arrive(value_free.index(last % NUM_STAGES), count=1)
    if SINKS:
        total += gl.exp2(gl.load(sink).to(gl.float32) * 1.4426950408889634 - peak * scale)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))[:, None]
    token = half * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    place = (out_row + token).to(gl.int64) * stride_out
    real = (first_token + token < query_len)[:, None]
    if HEAD_DIM != DIM:
        real = real & (dim < HEAD_DIM)[None, :]
    gl.store(out + place[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=real)
