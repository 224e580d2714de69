"""Attention of rows of one token each over a paged cache of e4m3, for Hopper; the plain twin is `decode`.

Half as many bytes leave half the time for each, so that keys and values go from memory into the registers of matrix
instructions: no shared memory, no move between threads. A thread loads 16 bytes of a key or value, and the inputs of an
instruction are counted in the order that this makes. Queries are the left operand of scores, whose registers are then
the right operand of sums: out.T = values.T weights.T, in which heads take 8 columns and not 16 rows. The chip converts
pairs of e4m3 to float16, which holds them exactly; a query is divided by a power of two so that float16 holds it, too.
One warp is a program. The keys of the next tile are on their way while one is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from .attention import LOG2E, dense_heads, inverses_of, scales_of, to_cache
from .barriers import barrier as real_barrier
from .chain import await_previous, chained
from .coded_fragments import _nothing, _plain_float, _with
from .paged import Projected, Rows, cache_scales, layer_of, paged_cache, scores_of
from .portable import INTERPRETED, gl, gluon, mma_v2
from .spans import own_span

barrier = gl.barrier if INTERPRETED else real_barrier
_ASM = tl.constexpr(not INTERPRETED)
#: Heads of a program, and keys that a page must hold a multiple of.
HEADS, KEYS = 8, 16
#: Four e4m3 of a word to two pairs of float16, bytes 0 and 1, and 2 and 3.
_PAIRS = tl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
#: Words of two keys to four pairs of float16: of each byte of a word, that of the first and that of the second key.
_CROSSED = tl.constexpr("""{
.reg .b32 x, y;
.reg .b16 a, b, c, d;
prmt.b32 x, $4, $5, 0x5140;
prmt.b32 y, $4, $5, 0x7362;
mov.b32 {a, b}, x;
mov.b32 {c, d}, y;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")


@dataclass(frozen=True)
class NarrowLaunch:
    """Sizes of a launch: most splits of a row's keys, how short they may be, and groups of 16 keys in a tile.

    `min_span` is as for `decode.DecodeLaunch`.
    """

    splits: int
    min_span: int = 0
    groups: int = 2


@gluon.jit
def _halves(pairs):
    """int32 [...] → float16 [..., 2], the lower 16 bits first."""
    low = pairs.to(gl.int16).to(gl.float16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _numbers(words):
    """float16 [16, 32, 2, 2] of words [16, 32]: which half of a word, and of a half."""
    if _ASM:
        a, b = gl.inline_asm_elementwise(_PAIRS, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        found = gl.join(_halves(a), _halves(b))
    else:
        found = gl.join(
            gl.join(_plain_float(words, 0, gl.float16), _plain_float(words, 1, gl.float16)),
            gl.join(_plain_float(words, 2, gl.float16), _plain_float(words, 3, gl.float16)),
        )
    return gl.permute(found, (0, 1, 3, 2))


@gluon.jit
def _key_operand(words, SCORES: tl.constexpr):
    """[128, 16]: the numbers of keys, words [16, 32], in the order of `_feature`."""
    keys = gl.reshape(_numbers(words), (16, 2, 4, 2, 8))
    keys = gl.permute(gl.reshape(gl.permute(keys, (0, 1, 3, 2, 4)), (16, 128)), (1, 0))
    return gl.convert_layout(keys, gl.DotOperandLayout(1, SCORES, 8), assert_trivial=True)


@gluon.jit
def _feature(place):
    """Which number of a key has a place among the inputs of `_key_operand`."""
    return place // 64 * 64 + place // 8 % 4 * 16 + place // 32 % 2 * 8 + place % 8


@gluon.jit
def _crossed(first, second):
    """float16 [..., 2, 2, 2] of words [...] of two keys: half of a word, half of that, and which key."""
    if _ASM:
        a, b, c, d = gl.inline_asm_elementwise(
            _CROSSED, "=&r,=&r,=&r,=&r,r,r", [first, second],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        found = gl.join(gl.join(_halves(a), _halves(c)), gl.join(_halves(b), _halves(d)))
    else:
        one = gl.join(_plain_float(first, 0, gl.float16), _plain_float(second, 0, gl.float16))
        two = gl.join(_plain_float(first, 1, gl.float16), _plain_float(second, 1, gl.float16))
        three = gl.join(_plain_float(first, 2, gl.float16), _plain_float(second, 2, gl.float16))
        four = gl.join(_plain_float(first, 3, gl.float16), _plain_float(second, 3, gl.float16))
        found = gl.join(gl.join(one, three), gl.join(two, four))
    return found  # [..., key, half of a word, half of that]


@gluon.jit
def _value_operand(words, SUMS: tl.constexpr):
    """[128, 16]: the numbers of values, words [16, 32], turned; row m is number m % 8 * 16 + m // 8."""
    # a key's number is 8 i + 2 t + b, and a word's 4 g + w
    pairs = gl.permute(gl.reshape(words, (2, 4, 2, 8, 4)), (0, 1, 3, 4, 2))
    first, second = gl.split(pairs)
    found = _crossed(first, second)  # [i, t, g, w, b, half, half of that]
    found = gl.reshape(gl.permute(found, (3, 5, 6, 2, 0, 1, 4)), (128, 16))
    return gl.convert_layout(found, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _real_heads(scores, HEADS: tl.constexpr):
    """The first 8 rows of scores [16, 16]."""
    both = gl.permute(gl.reshape(scores, (2, 8, 16)), (1, 2, 0))
    real, _ = gl.split(both)
    return gl.convert_layout(real, HEADS, assert_trivial=True)


@gluon.jit
def _pages(table, at, last, PAGE: tl.constexpr, GROUPS: tl.constexpr):
    """The blocks of the groups of a tile."""
    found = _nothing()
    for group in gl.static_range(GROUPS):
        position = gl.minimum(at + group * 16, last)
        found = _with(found, gl.load(table + position // PAGE))
    return found


@gluon.jit
def _load(words, pages, at, places, there, stride_block, stride_token, PAGE: tl.constexpr, GROUPS: tl.constexpr):
    """The words of the groups of a tile, undefined unless `there`."""
    found = _nothing()
    for group in gl.static_range(GROUPS):
        base = pages[group].to(gl.int64) * stride_block + (at + group * 16) % PAGE * stride_token
        found = _with(found, gl.load(words + base + places, mask=there))
    return found


@gluon.jit
def _weigh(scores, peak, total, factor, GROUPS: tl.constexpr):
    """Softmax of a tile against what came before: (weights, new peak, new total, factor of what came before)."""
    highest = scores[0]
    for group in gl.static_range(1, GROUPS):
        highest = gl.maximum(highest, scores[group])
    new_peak = gl.maximum(peak, gl.max(highest, 1) * factor)
    shrink = gl.exp2(peak - new_peak)
    total = total * shrink[:, None]
    weights = _nothing()
    for group in gl.static_range(GROUPS):
        weight = gl.exp2(scores[group] * factor[:, None] - new_peak[:, None])
        total += weight
        weights = _with(weights, weight)
    return weights, new_peak, total, shrink


@gluon.jit
def _score(query, words, SCORES: tl.constexpr, HEADS: tl.constexpr):
    """Scores [8, 16] of a group of keys."""
    empty = gl.zeros([16, 16], gl.float32, SCORES)
    return _real_heads(mma_v2(query, _key_operand(words, SCORES), empty), HEADS)


@gluon.jit
def _add(acc, weight, words, SUMS: tl.constexpr):
    """acc [128, 8] and the weighted values of a group."""
    right = gl.permute(weight.to(gl.float16), (1, 0))
    right = gl.convert_layout(right, gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)
    return mma_v2(_value_operand(words, SUMS), right, acc)


@gluon.jit
def _store_token(tokens, cache, scales, rows, row, kv_head, LAYER: tl.constexpr, LINE: tl.constexpr):
    """Puts key and value of a row's token into its slot, if it has one, where the program's threads see them."""
    PAGE: tl.constexpr = LAYER.block_size
    slot = gl.load(rows.slots + row)
    if slot >= 0:
        dim = gl.arange(0, 128, LINE)
        place = slot // PAGE * cache.stride_block + slot % PAGE * cache.stride_token + kv_head * cache.stride_head
        token = row.to(gl.int64)
        by = inverses_of(scales, kv_head, True)
        dtype: tl.constexpr = cache.key.dtype.element_ty
        source = token * tokens.stride_key + kv_head * 128 + dim
        key = to_cache(gl.load(tokens.key + source), by[0], dtype, LAYER.limit)
        source = token * tokens.stride_value + kv_head * 128 + dim
        value = to_cache(gl.load(tokens.value + source), by[1], dtype, LAYER.limit)
        gl.store(cache.key + place + dim, key)
        gl.store(cache.value + place + dim, value)
    barrier()


@gluon.jit
def _join(out, partial, lse, first_head, used, LAYER: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr):
    """out = Σ 2^(lse_i - peak) partial_i / Σ 2^(lse_i - peak) over the first `used` parts, two at a time."""
    HEADS: tl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PARTS))
    lane = gl.arange(0, 8, HEADS)
    split = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, PARTS)))
    dim = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    peak = gl.full([8], float("-inf"), gl.float32, HEADS)
    total = gl.zeros([8], gl.float32, HEADS)
    acc = gl.zeros([8, 128], gl.float32, gl.SliceLayout(1, PARTS))
    for first in range(0, used, 2):
        real = (lane < LAYER.groups)[:, None] & (first + split < used)[None, :]
        place = ((first_head + lane) * ROOM)[:, None] + (first + split)[None, :]
        size = gl.load(lse + place, mask=real, other=float("-inf"), cache_modifier=".cg")
        new_peak = gl.maximum(peak, gl.max(size, 1))
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, weight = gl.exp2(peak - base), gl.exp2(size - base[:, None])
        value = gl.load(
            partial + place[:, :, None] * 128 + dim[None, None, :], mask=(weight != 0.0)[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        total = total * shrink + gl.sum(weight, 1)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, gl.SliceLayout(1, PARTS)))
        acc = acc * shrink[:, None] + gl.sum(value * weight[:, :, None], 1)
        peak = new_peak
    total = gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(1, PARTS)))
    acc = acc / gl.where(total == 0.0, 1.0, total)[:, None]
    head = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(1, PARTS)))
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, PARTS)))
    target = out + ((first_head + head) * 128)[:, None] + column[None, :]
    gl.store(target, acc.to(out.dtype.element_ty), mask=(head < LAYER.groups)[:, None])


# What must not be specialised stands alone: Triton would specialise it in a tuple.
@gluon.jit(do_not_specialize=["ordered", "min_span"])
def _narrow_decode(
    out, parts, tokens, cache, words, scales, rows, scores, ordered, min_span,
    LAYER: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr, ROOM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, QUERIES: tl.constexpr, SCORES: tl.constexpr, HEADS: tl.constexpr,
    LINE: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: the token of a row, the heads of one KV head, one split of the keys."""
    SUMS: tl.constexpr = SCORES
    BLOCK_N: tl.constexpr = GROUPS * 16
    PAGE: tl.constexpr = LAYER.block_size
    partial, lse, arrivals = parts
    await_previous(CHAINED, LONG=True)
    split, kv_head, row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if ordered:
        row = gl.load(rows.order + row)
    first_head = row.to(gl.int64) * (gl.num_programs(1) * LAYER.groups) + kv_head * LAYER.groups
    out_head = gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    lane = gl.arange(0, 128, gl.SliceLayout(1, SUMS))
    out_dim = lane % 8 * 16 + lane // 8
    real = (out_head < LAYER.groups)[None, :]
    target = (first_head + out_head)[None, :] * 128 + out_dim[:, None]
    seq_len = gl.load(rows.seq_lens + row)
    low, high, used = 0, seq_len, 1
    if SPLIT:
        span = own_span(seq_len, gl.num_programs(0), min_span, BLOCK_N)
        used = (seq_len + span - 1) // gl.maximum(span, 1)
        low = split * span
        high = gl.minimum(low + span, seq_len)
    if seq_len == 0:  # padding owns no key
        if split == 0:
            gl.store(out + target, gl.zeros([128, 8], out.dtype.element_ty, SUMS), mask=real)
    elif split < used:
        # a program without splits has no condition that is always true: the compiler fails in branches that it knows
        # are never taken
        if SPLIT:
            if high == seq_len:  # this split reads the new token, so it stores it first
                _store_token(tokens, cache, scales, rows, row, kv_head, LAYER, LINE)
        else:
            _store_token(tokens, cache, scales, rows, row, kv_head, LAYER, LINE)

        head = gl.arange(0, 16, gl.SliceLayout(1, QUERIES))
        feature = _feature(gl.arange(0, 128, gl.SliceLayout(0, QUERIES)))
        source = tokens.query + row.to(gl.int64) * tokens.stride_query + kv_head * (LAYER.groups * 128)
        query = gl.load(
            source + (head * 128)[:, None] + feature[None, :], mask=(head < LAYER.groups)[:, None], other=0.0
        ).to(gl.float32)
        # the largest of a head becomes 2 ** 14 and some: bits of exponents, no less than those of 2 ** -100
        largest = gl.max(gl.abs(query), 1).to(gl.int32, bitcast=True) >> 23
        largest = gl.minimum(gl.maximum(largest, 27), 254)
        query *= ((268 - largest) << 23).to(gl.float32, bitcast=True)[:, None]
        query = gl.convert_layout(query.to(gl.float16), gl.DotOperandLayout(0, SCORES, 8), assert_trivial=True)
        unit = ((largest - 14) << 23).to(gl.float32, bitcast=True)
        unit, _ = gl.split(gl.permute(gl.reshape(unit, (2, 8)), (1, 0)))
        scale, value_scale = scales_of(scores, kv_head)
        factor = gl.convert_layout(unit, gl.SliceLayout(1, HEADS)) * (scale * LOG2E)

        of_head = kv_head * words.stride_head
        key_row = gl.arange(0, 16, gl.SliceLayout(1, KEYS))
        value_row = gl.arange(0, 16, gl.SliceLayout(1, VALUES))
        key_places = (key_row * words.stride_token)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, KEYS))[None, :]
        value_places = (value_row * words.stride_token)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, VALUES))[None, :]
        table = rows.block_table + row.to(gl.int64) * rows.stride_table
        peak = gl.full([8], float("-inf"), gl.float32, gl.SliceLayout(1, HEADS))
        total = gl.zeros([8, 16], gl.float32, HEADS)
        acc = gl.zeros([128, 8], gl.float32, SUMS)
        full = low + (high - low) // BLOCK_N * BLOCK_N
        pages = _pages(table, low, high - 1, PAGE, GROUPS)
        keys = _load(words.key + of_head, pages, low, key_places, low < full, words.stride_block, words.stride_token,
                     PAGE, GROUPS)  # fmt: skip
        held = _load(words.value + of_head, pages, low, value_places, low < full, words.stride_block,
                     words.stride_token, PAGE, GROUPS)  # fmt: skip
        pages = _pages(table, low + BLOCK_N, high - 1, PAGE, GROUPS)
        for at in range(low, full, BLOCK_N):
            after = at + BLOCK_N
            found = _nothing()
            for group in gl.static_range(GROUPS):
                found = _with(found, _score(query, keys[group], SCORES, HEADS))
            keys = _load(words.key + of_head, pages, after, key_places, after < full, words.stride_block,
                         words.stride_token, PAGE, GROUPS)  # fmt: skip
            weights, peak, total, shrink = _weigh(found, peak, total, factor, GROUPS)
            acc *= gl.convert_layout(shrink, gl.SliceLayout(0, SUMS))[None, :]
            for group in gl.static_range(GROUPS):
                acc = _add(acc, weights[group], held[group], SUMS)
            held = _load(words.value + of_head, pages, after, value_places, after < full, words.stride_block,
                         words.stride_token, PAGE, GROUPS)  # fmt: skip
            pages = _pages(table, after + BLOCK_N, high - 1, PAGE, GROUPS)
        for at in range(full, high, 16):  # the rest, group by group
            base = gl.load(table + at // PAGE).to(gl.int64) * words.stride_block + at % PAGE * words.stride_token
            base += of_head
            own = gl.load(words.key + base + key_places, mask=(at + key_row < high)[:, None], other=0)
            score = _score(query, own, SCORES, HEADS)
            position = at + gl.arange(0, 16, gl.SliceLayout(0, HEADS))
            score = gl.where((position < high)[None, :], score, float("-inf"))
            weights, peak, total, shrink = _weigh(_with(_nothing(), score), peak, total, factor, 1)
            acc *= gl.convert_layout(shrink, gl.SliceLayout(0, SUMS))[None, :]
            own = gl.load(words.value + base + value_places, mask=(at + value_row < high)[:, None], other=0)
            acc = _add(acc, weights[0], own, SUMS)

        whole = gl.sum(total, 1)
        acc *= gl.convert_layout(value_scale / whole, gl.SliceLayout(0, SUMS))[None, :]
        if SPLIT:
            if used == 1:
                gl.store(out + target, acc.to(out.dtype.element_ty), mask=real)
            else:
                part = (first_head + out_head)[None, :] * ROOM + split
                gl.store(partial + part * 128 + out_dim[:, None], acc, mask=real)
                own_head = gl.arange(0, 8, gl.SliceLayout(1, HEADS))
                place = lse + (first_head + own_head) * ROOM + split
                gl.store(place, peak + gl.log2(whole), mask=own_head < LAYER.groups)
                barrier()
                arrival = arrivals + row * gl.num_programs(1) + kv_head
                if gl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
                    gl.store(arrival, 0)  # for the next launch
                    _join(out, partial, lse, first_head, used, LAYER, ROOM, PARTS)
        else:
            gl.store(out + target, acc.to(out.dtype.element_ty), mask=real)


@lru_cache(maxsize=1)
def _layouts() -> dict[str, object]:
    """How the threads of a warp hold the words of 16 keys or values, queries, scores and sums."""
    eight = [[1, 0], [2, 0], [4, 0]]
    return {
        "KEYS": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 16], [8, 0]], [[0, 4], [0, 8], *eight], [], [], [16, 32]
        ),
        "VALUES": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [], [], [16, 32]
        ),
        "QUERIES": gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], *eight], [], [], [16, 128]
        ),
        "HEADS": gl.DistributedLinearLayout([[0, 1], [0, 8]], [[0, 2], [0, 4], *eight], [], [], [8, 16]),
        "SCORES": gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]),
        "LINE": gl.BlockedLayout([4], [32], [1], [0]),
        "PARTS": gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 1, 1], [2, 1, 0]),
    }  # fmt: skip


def fits(head_dim: int, groups: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether there is a kernel for such a layer, which has no window, soft cap, sinks, slopes or shares of rows."""
    return (
        head_dim == 128
        and groups <= HEADS
        and block_size % KEYS == 0
        and dtype in (torch.bfloat16, torch.float16)
        and kv_dtype == torch.float8_e4m3fn
    )


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    out: Tensor,
    launch: NarrowLaunch,
    arrivals: Tensor,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    order: Tensor | None = None,
) -> Tensor:
    """As `decode.decode_attention`, of a layer that `fits` is true of; slots of -1 store nothing."""
    from .decode import room_for

    num_rows, num_heads, head_dim = query.shape
    kv_heads = kv_cache.shape[3]
    if num_rows == 0:
        return out
    if query.stride(2) != 1 or query.stride(1) != head_dim:
        query = query.contiguous()
    key, value = dense_heads(key), dense_heads(value)
    partial = lse = out
    parts = 1 if launch.splits == 1 else max(16, room_for(launch.splits))
    if launch.splits > 1:
        shape = (num_rows, num_heads, parts)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    _narrow_decode[(launch.splits, kv_heads, num_rows)](
        out, (partial, lse, arrivals),
        Projected(query, key, value, query.stride(0), key.stride(0), value.stride(0)), paged_cache(kv_cache),
        paged_cache(kv_cache.view(torch.int32)), cache_scales(key_scale, value_scale),
        Rows(slot_mapping, seq_lens, block_table, block_table.stride(0), seq_lens if order is None else order),
        scores_of(scale, 0.0, None, None, key_scale, value_scale), int(order is not None), launch.min_span,
        LAYER=layer_of(query, kv_cache), GROUPS=launch.groups, SPLIT=launch.splits > 1, ROOM=parts,
        num_warps=1, **_layouts(), **chained(query.device),
    )  # fmt: skip
    return out
