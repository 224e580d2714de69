"""Products of one to 64 rows with nibbles or 8-bit floats, whose registers are those of matrix instructions.

Such a product should take as long as reading the codes, for which a chip has few instructions to spend on a weight. A
thread loads 16 bytes of a row of codes: 32 nibbles, or 16 floats. Which inputs of a matrix instruction these are does
not matter, since rows of x are loaded in the same order; so nothing moves between threads, and two codes at a time
become a register that is multiplied. The warps of a program divide the inputs among them and add up their sums at the
end. Codes are as in `frame.kernels.quantized`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .chain import await_previous, chained
from .codes import E4M3_TO_BF16
from .linear_invariant import num_multiprocessors
from .portable import INTERPRETED, gl, gluon, mma_v2

#: The most rows of x.
MOST_ROWS = 64
_ASM = tl.constexpr(not INTERPRETED)
#: Two nibbles of a byte of a word, each in the lowest bits of a float whose steps are one there, less such a float.
_NIBBLES = """{
.reg .b32 up, a, b, c, d;
shr.u32 up, $4, 4;
prmt.b32 a, $4, up, 0x4400;
prmt.b32 b, $4, up, 0x5511;
prmt.b32 c, $4, up, 0x6622;
prmt.b32 d, $4, up, 0x7733;
lop3.b32 a, a, 0x000F000F, BITS, 0xEA;
lop3.b32 b, b, 0x000F000F, BITS, 0xEA;
lop3.b32 c, c, 0x000F000F, BITS, 0xEA;
lop3.b32 d, d, 0x000F000F, BITS, 0xEA;
sub.rn.TYPEx2 $0, a, $5;
sub.rn.TYPEx2 $1, b, $5;
sub.rn.TYPEx2 $2, c, $5;
sub.rn.TYPEx2 $3, d, $5;
}"""
_NIBBLES_BF16 = tl.constexpr(_NIBBLES.replace("BITS", "0x43004300").replace("TYPE", "bf16"))
_NIBBLES_F16 = tl.constexpr(_NIBBLES.replace("BITS", "0x64006400").replace("TYPE", "f16"))
_FLOATS_F16 = tl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")


@gluon.jit
def _halves(pairs, dtype: tl.constexpr):
    """int32 [...] → [..., 2] of a 16-bit float type, the lower 16 bits first."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _plain_nibbles(words, zero, PLACE: tl.constexpr, dtype: tl.constexpr):
    BASE: tl.constexpr = 128 if dtype == gl.bfloat16 else 1024
    found = ((words >> (4 * PLACE)) & 15).to(gl.float32) + BASE
    return (found - ((zero & 0x1F) + BASE).to(gl.float32)).to(dtype)


@gluon.jit
def _nibbles(words, zero, dtype: tl.constexpr):
    """[P, N, W, 2, 2, 2] of `dtype`: the nibbles of words [P, N, W], less zeros.

    `zero` int32 [P, N, 1] has the bits of two floats of the type: 128 or 1024, plus the zero.
    """
    if _ASM:
        CODE: tl.constexpr = _NIBBLES_BF16 if dtype == gl.bfloat16 else _NIBBLES_F16
        words, zero = gl.broadcast(words, zero)
        a, b, c, d = gl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r,r", [words, zero], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
        even = gl.join(_halves(a, dtype), _halves(b, dtype))
        odd = gl.join(_halves(c, dtype), _halves(d, dtype))
    else:
        n0, n1 = _plain_nibbles(words, zero, 0, dtype), _plain_nibbles(words, zero, 1, dtype)
        n2, n3 = _plain_nibbles(words, zero, 2, dtype), _plain_nibbles(words, zero, 3, dtype)
        n4, n5 = _plain_nibbles(words, zero, 4, dtype), _plain_nibbles(words, zero, 5, dtype)
        n6, n7 = _plain_nibbles(words, zero, 6, dtype), _plain_nibbles(words, zero, 7, dtype)
        even = gl.join(gl.join(n0, n1), gl.join(n2, n3))
        odd = gl.join(gl.join(n4, n5), gl.join(n6, n7))
    # [P, N, W, half of a register, byte of a half word, half word]
    return gl.permute(gl.join(even, odd), (0, 1, 2, 5, 4, 3))


@gluon.jit
def _plain_float(words, PLACE: tl.constexpr, dtype: tl.constexpr):
    code = (words >> (8 * PLACE)) & 255
    size = ((code & 127) << 20).to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return gl.where(code >= 128, -size, size).to(dtype)


@gluon.jit
def _floats(words, dtype: tl.constexpr):
    """[P, N, W, 2, 2] of `dtype`: the 8-bit floats of words [P, N, W]."""
    if _ASM:
        if dtype == gl.bfloat16:
            a, b = gl.inline_asm_elementwise(
                E4M3_TO_BF16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
        else:
            a, b = gl.inline_asm_elementwise(
                _FLOATS_F16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
        found = gl.join(_halves(a, dtype), _halves(b, dtype))
    else:
        found = gl.join(
            gl.join(_plain_float(words, 0, dtype), _plain_float(words, 1, dtype)),
            gl.join(_plain_float(words, 2, dtype), _plain_float(words, 3, dtype)),
        )
    return gl.permute(found, (0, 1, 2, 4, 3))


@gluon.jit
def _fetch(
    source, scales, zeros, scale_row, zero_row, chunk, own, chunks,
    GROUP: tl.constexpr, CHUNK: tl.constexpr, ZEROS: tl.constexpr, NIBBLES: tl.constexpr,
):  # fmt: skip
    """(words, scales, zeros) of a chunk; where there are none of a kind, something else."""
    PER: tl.constexpr = GROUP // CHUNK if GROUP else 1 << 30
    there = chunk < chunks
    if NIBBLES:  # what is beyond the inputs multiplies zeros
        words = gl.load(source, mask=there[:, :, None])
    else:
        words = gl.load(source, mask=there[:, :, None], other=0)
    scale, zero = own, chunk
    if GROUP:
        scale = gl.load(scales + scale_row + own // PER, mask=own < chunks, other=0.0)
    if ZEROS:
        zero = gl.load(zeros + zero_row + chunk // PER, mask=there, other=0)
    return words, scale, zero


@gluon.jit
def _pieces(words, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, NIBBLES: tl.constexpr):
    """Of a chunk's words [P, N, 4 · WIDE] those of eight codes of each thread, a tensor for each such eight."""
    found = _with(_nothing(), words)
    if not NIBBLES and WIDE == 4:
        first, second = gl.split(gl.permute(gl.reshape(words, (PARTS, BLOCK_N, 4, 2, 2)), (0, 1, 2, 4, 3)))
        found = (gl.reshape(first, (PARTS, BLOCK_N, 8)), gl.reshape(second, (PARTS, BLOCK_N, 8)))
    elif NIBBLES and WIDE == 4:
        even, odd = gl.split(gl.reshape(words, (PARTS, BLOCK_N, 4, 2, 2)))
        zeroth, second = gl.split(even)
        first, third = gl.split(odd)
        found = (zeroth, first, second, third)
    elif NIBBLES and WIDE == 2:
        zeroth, first = gl.split(gl.reshape(words, (PARTS, BLOCK_N, 4, 2)))
        found = (zeroth, first)
    return found


@gluon.jit
def _nothing():
    return ()


@gluon.jit
def _with(values, value):
    """The tuple with one more value."""
    return values + (value,)  # noqa: RUF005 (the compiler knows no other way)


@gluon.jit
def _rows_of(x_source, kept, EVEN: tl.constexpr):
    """[P, 32, M] of x."""
    if EVEN:
        found = gl.load(x_source)
    else:
        found = gl.load(x_source, mask=kept, other=0.0)
    return gl.permute(found, (0, 2, 1))


@gluon.jit
def _places(
    codes, tile, outputs, words, groups,
    ROWS_PER: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, WORDS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """(where the words of a tile's first chunks lie, rows of its scales, and of its zeros)."""
    output = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    output = gl.minimum(output, outputs - 1)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None]
    word = gl.arange(0, 4 * WIDE, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, None, :]
    source = codes + (output.to(gl.int64) * words)[None, :, None] + part[:, :, None] * (4 * WIDE) + word
    column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    column = gl.minimum(column, outputs - 1)
    return source, (column // ROWS_PER * groups)[None, :], (output // ROWS_PER * groups)[None, :]


@gluon.jit(do_not_specialize=["rows"])
def _fragments(
    x, codes, scales, zeros, bias, out, rows, outputs, words, chunks, groups, stride_x, tiles,
    GROUP: tl.constexpr, ROWS_PER: tl.constexpr, NIBBLES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, SEVERAL: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, ACROSS: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr, RING: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
    SUMS: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr, num_warps: tl.constexpr,
):  # fmt: skip
    # GROUP 0: one scale for all columns, which multiplies the sum. A chunk is what a warp loads at once
    LEFT: tl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    RIGHT: tl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    BLOCK_N: tl.constexpr = 16 * TILES * ACROSS
    EACH: tl.constexpr = WIDE * (8 if NIBBLES else 4)  # columns of a thread
    CHUNK: tl.constexpr = 4 * EACH
    BITS: tl.constexpr = 0x43004300 if x.dtype.element_ty == gl.bfloat16 else 0x64006400
    dtype: tl.constexpr = x.dtype.element_ty
    first_tile = gl.program_id(0)
    source, scale_row, zero_row = _places(
        codes, first_tile, outputs, words, groups, ROWS_PER, BLOCK_N, PARTS, WIDE, WORDS, SUMS
    )
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))[:, None]
    own = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]

    x_part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, ROWS)))[:, None, None]
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, ROWS)))[None, :, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, None, :]
    # eight codes of a thread lie side by side in the operands; its own follow one another in memory
    lane = lane // 8 * EACH + lane % 8
    x_source = x + gl.minimum(row, rows - 1).to(gl.int64) * stride_x + x_part * CHUNK + lane

    ring = _nothing()
    for slot in gl.static_range(RING):
        at = slot * PARTS
        fetched = _fetch(
            source + at * (4 * WIDE), scales, zeros, scale_row, zero_row, at + part, at + own, chunks,
            GROUP, CHUNK, ZEROS, NIBBLES,
        )  # fmt: skip
        ring = _with(ring, fetched)
    await_previous(CHAINED)
    end, stride = first_tile + 1, 1
    if SEVERAL:
        end, stride = tiles, gl.num_programs(0)
    for tile in range(first_tile, end, stride):
        acc = gl.zeros([PARTS, BLOCK_N, BLOCK_M], gl.float32, SUMS)
        if SEVERAL:
            next_source, next_scale_row, next_zero_row = _places(
                codes, tile + stride, outputs, words, groups,
                ROWS_PER, BLOCK_N, PARTS, WIDE, WORDS, SUMS,
            )  # fmt: skip
        for first in range(0, chunks, PARTS * RING):
            source += RING * PARTS * 4 * WIDE
            later, limit = first + RING * PARTS, chunks
            if SEVERAL:  # the chunks after a tile's last ones are the next tile's
                source = gl.where(later < chunks, source, next_source)
                scale_row = gl.where(later < chunks, scale_row, next_scale_row)
                zero_row = gl.where(later < chunks, zero_row, next_zero_row)
                limit = gl.where((later < chunks) | (tile + stride < tiles), chunks, 0)
                later = gl.where(later < chunks, later, 0)
            following = _nothing()
            for slot in gl.static_range(RING):
                found, scale, zero = ring[slot]
                pieces = _pieces(found, PARTS, BLOCK_N, WIDE, NIBBLES)
                kept = first + slot * PARTS + x_part < chunks
                x_at = x_source + (first + slot * PARTS) * CHUNK
                values = (_rows_of(x_at, kept, EVEN),)
                if BLOCK_M <= 16:
                    for piece in gl.static_range(1, EACH // 8):
                        values = _with(values, _rows_of(x_at + piece * 8, kept, EVEN))
                product = acc
                if GROUP:
                    product = gl.zeros([PARTS, BLOCK_N, BLOCK_M], gl.float32, SUMS)
                for piece in gl.static_range(EACH // 8):
                    if BLOCK_M > 16 and piece + 1 < EACH // 8:
                        values = _with(values, _rows_of(x_at + (piece + 1) * 8, kept, EVEN))
                    if NIBBLES:
                        eights = gl.convert_layout(pieces[piece], WORD, assert_trivial=True)
                        own_zero = gl.full_like(eights, BITS + 0x00080008)
                        if ZEROS:
                            stored = gl.convert_layout(zero, gl.SliceLayout(2, WORD), assert_trivial=True)
                            own_zero = (stored.to(gl.int32) * 0x00010001 + BITS)[:, :, None]
                        weight = _nibbles(eights, own_zero, dtype)
                    else:
                        weight = _floats(pieces[piece], dtype)
                    left = gl.convert_layout(gl.reshape(weight, (PARTS, BLOCK_N, 32)), LEFT, assert_trivial=True)
                    right = gl.convert_layout(values[piece], RIGHT, assert_trivial=True)
                    product = mma_v2(left, right, product)
                at = later + slot * PARTS
                fetched = _fetch(
                    source + slot * (PARTS * 4 * WIDE), scales, zeros, scale_row, zero_row, at + part, at + own,
                    limit, GROUP, CHUNK, ZEROS, NIBBLES,
                )  # fmt: skip
                following = _with(following, fetched)
                if GROUP:
                    acc += product * scale.to(gl.float32)[:, :, None]
                else:
                    acc = product
            ring = following
        total = gl.sum(acc, 0)
        column = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        there = column < outputs
        if not GROUP:
            total *= gl.load(scales + column // ROWS_PER * groups, mask=there, other=0.0).to(gl.float32)[:, None]
        if BIAS:
            total += gl.load(bias + column, mask=there, other=0.0).to(gl.float32)[:, None]
        own_row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
        gl.store(out + own_row * outputs + column[:, None], total.to(dtype), mask=there[:, None] & (own_row < rows))


@dataclass(frozen=True)
class Fragments:
    """Sizes of a program.

    They are tiles of 16 outputs of a warp, warps of other outputs, warps of other inputs, the chunks of a warp that are
    on their way, and the programs of a multiprocessor, which go from tile to tile; 0: each has one.
    """

    tiles: int
    across: int
    parts: int
    ring: int
    programs: int = 0


def _bits(count: int) -> int:
    return count.bit_length() - 1


@lru_cache(maxsize=256)
def _layouts(sizes: Fragments, wide: int, block_m: int) -> dict[str, object]:
    """How threads hold the words of codes, the sums, and the rows of x."""
    block_n = 16 * sizes.tiles * sizes.across
    tiles = [[0, 16 * sizes.across << bit, 0] for bit in range(_bits(sizes.tiles))]
    across = [[0, 16 << bit, 0] for bit in range(_bits(sizes.across))]
    parts = [[1 << bit, 0, 0] for bit in range(_bits(sizes.parts))]
    eight = [[0, 1, 0], [0, 2, 0], [0, 4, 0]]
    words = gl.DistributedLinearLayout(
        [[0, 0, 1 << bit] for bit in range(_bits(wide))] + [[0, 8, 0], *tiles],
        [[0, 0, wide], [0, 0, 2 * wide], *eight], [*across, *parts], [], [sizes.parts, block_n, 4 * wide],
    )  # fmt: skip
    word = gl.DistributedLinearLayout(
        [[0, 8, 0], *tiles], [[0, 0, 1], [0, 0, 2], *eight], [*across, *parts], [], [sizes.parts, block_n, 4]
    )  # fmt: skip
    rows = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, 8 << bit, 0] for bit in range(_bits(block_m // 8))],
        [[0, 0, 8], [0, 0, 16], *eight], [*[[0, 0, 0]] * len(across), *parts], [], [sizes.parts, block_m, 32],
    )  # fmt: skip
    sums = gl.NVMMADistributedLayout([2, 0], [sizes.parts, sizes.across, 1], [1, 16, 8])
    return {"WORDS": words, "WORD": word, "SUMS": sums, "ROWS": rows}


def width(depth: int, group: int, *, nibbles: bool) -> int:
    """The words of a thread's load, so that a chunk has one scale, of groups of `group` columns; 0 where none fits."""
    for wide in (4, 2, 1) if nibbles else (4, 2):
        chunk = 4 * wide * (8 if nibbles else 4)
        if depth % chunk == 0 and group % chunk == 0:
            return wide
    return 0


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
    """Whether `product` takes the weight."""
    nibbles = codes.dtype == torch.int32
    if not nibbles and codes.dtype != torch.float8_e4m3fn:
        return False
    depth = codes.shape[-1] * (8 if nibbles else 1)
    whole = codes.is_contiguous() and scales.is_contiguous() and codes.data_ptr() % 16 == 0
    return whole and bool(width(depth, block[1] if scales.shape[-1] > 1 else depth, nibbles=nibbles))


def bucket(rows: int) -> int:
    """The rows of a program that multiplies so many."""
    return max(8, 1 << (rows - 1).bit_length())


def product(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None,
    sizes: Fragments,
) -> Tensor:  # fmt: skip
    """x Wᵀ + b for x [rows, K] of 16 bits, and codes [N, K], or nibbles int32 [N, K / 8], that `fits`; one launch."""
    rows, outputs, groups = len(x), len(codes), scales.shape[-1]
    nibbles = codes.dtype == torch.int32
    depth = codes.shape[-1] * (8 if nibbles else 1)
    wide = width(depth, block[1] if groups > 1 else depth, nibbles=nibbles)
    chunk = 4 * wide * (8 if nibbles else 4)
    block_m = bucket(rows)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    words = codes.view(torch.int32)
    tiles = triton.cdiv(outputs, 16 * sizes.tiles * sizes.across)
    programs = min(tiles, sizes.programs * num_multiprocessors(x.device) if sizes.programs else tiles)
    _fragments[(programs,)](
        x, words, scales, zeros, bias, out, rows, outputs, words.shape[-1], depth // chunk, groups, x.stride(0),
        tiles, GROUP=block[1] if groups > 1 else 0, ROWS_PER=block[0], NIBBLES=nibbles, ZEROS=zeros is not None,
        BIAS=bias is not None, BLOCK_M=block_m, TILES=sizes.tiles, ACROSS=sizes.across, PARTS=sizes.parts,
        WIDE=wide, RING=sizes.ring, EVEN=depth // chunk % (sizes.parts * sizes.ring) == 0,
        SEVERAL=programs < tiles,
        num_warps=sizes.across * sizes.parts, **_layouts(sizes, wide, block_m), **chained(x.device),
    )  # fmt: skip
    return out
