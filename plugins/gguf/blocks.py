"""The values of blocks of weights, each block by itself: [..., bytes of a block] → float32 [..., its values].

The layouts are ggml's. Scales are float16, of MXFP4 powers of two; products are taken in float32, in the order in which
ggml takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from .types import BY_NAME

#: What the codes of a type stand for, where that is no distance from a zero. Those of MXFP4 are twice its 4-bit floats.
_UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES: Mapping[str, tuple[int, ...]] = {
    "IQ4_NL": _UNEVEN,
    "IQ4_XS": _UNEVEN,
    "MXFP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}


def dequantize(packed: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., blocks, bytes of a block] → [..., blocks · values of a block]."""
    return _READERS[kind](packed).flatten(-2).to(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at a byte of each block, as float32 [..., 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:
    """[..., n] → [..., 2n]: the lower halves of all bytes, then the upper ones."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _shifted(codes: Tensor, run: int, bits: int) -> Tensor:
    """[..., n] → [..., n · 8 / bits]: of each run of bytes first the lowest `bits` of all, then the next, …"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    wide: Tensor = codes.unflatten(-1, (-1, 1, run)) >> shifts[:, None]
    masked: Tensor = wide & (2**bits - 1)
    return masked.flatten(-3)


def _fifths(blocks: Tensor, at: int) -> Tensor:
    """Bit i of a little-endian word of 32 bits, as bit 4 of value i."""
    bits = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (bits & 1).flatten(-2) << 4


def codes_and_scale(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(codes, float16 scale [..., 1]) of Q8_0, int8 [..., 32], or of Q4_0, uint8 whose zero is 8."""
    scale = blocks[..., :2].contiguous().view(torch.float16)
    return blocks[..., 2:].view(torch.int8) if kind == "Q8_0" else _nibbles(blocks[..., 2:]), scale


def _q4_0(blocks: Tensor) -> Tensor:
    codes, scale = codes_and_scale(blocks, "Q4_0")
    return scale.float() * (codes.float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * ((_nibbles(blocks[..., 6:]) | _fifths(blocks, 2)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[..., 8:]) | _fifths(blocks, 4)).float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    codes, scale = codes_and_scale(blocks, "Q8_0")
    return scale.float() * codes.float()


def _scaled(scales: Tensor, codes: Tensor, minima: Tensor | None = None) -> Tensor:
    """Codes [..., 256] times the scale of each run, less its minimum; scales and minima are [..., runs]."""
    runs: Tensor = codes.unflatten(-1, (scales.shape[-1], -1)).float() * scales[..., None]
    return (runs if minima is None else runs - minima[..., None]).flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of scales (low) and minima (high) of 4 bits, 64 of codes, d, dmin."""
    both = blocks[..., :16]
    scales, minima = _half(blocks, 80) * (both & 15).float(), _half(blocks, 82) * (both >> 4).float()
    return _scaled(scales, _shifted(blocks[..., 16:80], 32, 2), minima)


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits, 64 of codes, 12 of scales of 6 bits, d. A third bit that is 0 takes 4 away."""
    codes = _shifted(blocks[..., 32:96], 32, 2).to(torch.int8)
    third = _shifted(blocks[..., :32], 32, 1).to(torch.int8)
    low, high = _nibbles(blocks[..., 96:104]), _shifted(blocks[..., 104:108], 4, 2)
    scales = (low | high << 4).to(torch.int8) - 32
    return _scaled(_half(blocks, 108) * scales.float(), codes + 4 * third - 4)


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) [..., 8] of Q4_K and Q5_K: d, dmin, 4 bytes of scales, 4 of minima, 4 with nibbles of both.

    The upper two bits of the first four are those of the last four, whose lower bits are the nibbles.
    """
    first, second, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1)
    return scales, minima


def half_exponents(scales: Tensor) -> Tensor:
    """float32 2^(x - 128) of uint8 x: half of the power of two that a scale of MXFP4 stands for."""
    wide = scales.to(torch.int32)
    return torch.where(wide < 2, (wide + 1) << 21, (wide - 1) << 23).view(torch.float32)


def numbers_of(codes: Tensor, kind: str) -> Tensor:
    """The float32 numbers of a type's table that codes uint8 stand for."""
    return torch.tensor(TABLES[kind], dtype=torch.float32, device=codes.device)[codes.long()]


def codes_of(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes uint8 [..., values], scales, minima) of the types that are held as `Planes`, as the file has them.

    Scales and minima are uint8 [..., 8]; of Q6_K scales are int8 [..., 16], of IQ4_XS int8 [..., 8], of IQ4_NL float16
    [..., 1], and of MXFP4 uint8 [..., 1], and none of these has minima.
    """
    if kind == "IQ4_NL":
        return _nibbles(blocks[..., 2:]), blocks[..., :2].contiguous().view(torch.float16), None
    if kind == "MXFP4":
        return _nibbles(blocks[..., 1:]), blocks[..., :1].contiguous(), None
    if kind == "IQ4_XS":  # d, 2 bytes of upper bits of scales, 4 of their lower ones, 128 of codes
        low, high = _shifted(blocks[..., 4:8], 1, 4), _shifted(blocks[..., 2:4], 1, 2)
        return _shifted(blocks[..., 8:], 16, 4), (low | high << 4).to(torch.int8) - 32, None
    if kind == "Q6_K":  # 128 bytes of lower bits, 64 of upper ones, 16 scales of 8 bits, d
        codes = _shifted(blocks[..., :128], 64, 4) | _shifted(blocks[..., 128:192], 32, 2) << 4
        return codes, blocks[..., 192:208].contiguous().view(torch.int8), None
    if kind == "Q4_K":
        return _shifted(blocks[..., 16:], 32, 4), *_six_bits(blocks)
    codes = _shifted(blocks[..., 48:], 32, 4) | _shifted(blocks[..., 16:48], 32, 1) << 4
    return codes, *_six_bits(blocks)


def _by_codes(blocks: Tensor, kind: str) -> Tensor:
    codes, scales, minima = codes_of(blocks, kind)
    if minima is None:
        return _scaled(_half(blocks, 208) * scales.float(), codes.to(torch.int8) - 32)
    return _scaled(_half(blocks, 0) * scales.float(), codes, _half(blocks, 2) * minima.float())


def _by_table(blocks: Tensor, kind: str) -> Tensor:
    codes, scales, _ = codes_of(blocks, kind)
    if kind == "IQ4_XS":
        return _scaled(_half(blocks, 0) * scales.float(), numbers_of(codes, kind))
    return (half_exponents(scales) if kind == "MXFP4" else scales.float()) * numbers_of(codes, kind)


def _ternary(codes: Tensor, digits: int) -> Tensor:
    """[..., n] → [..., n · digits]: of all bytes, as fractions of 256, the first digit to base 3, then the next, …"""
    moved = torch.stack([codes * 3**place for place in range(digits)], -2)
    return (moved.to(torch.int16) * 3 >> 8).flatten(-2)


def _tq1_0(blocks: Tensor) -> Tensor:
    """32 and 16 bytes of five digits, 4 of four, d."""
    runs = _ternary(blocks[..., :32], 5), _ternary(blocks[..., 32:48], 5), _ternary(blocks[..., 48:52], 4)
    return _half(blocks, 52) * (torch.cat(runs, -1) - 1).float()


def _tq2_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 64) * (_shifted(blocks[..., :64], 32, 2).to(torch.int8) - 1).float()


_READERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": partial(_by_codes, kind="Q4_K"),
    "Q5_K": partial(_by_codes, kind="Q5_K"),
    "Q6_K": partial(_by_codes, kind="Q6_K"),
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    **{kind: partial(_by_table, kind=kind) for kind in TABLES},
}
#: The types whose blocks stay in memory.
PACKED = tuple(name for name in BY_NAME if name in _READERS)
