"""Codes of few bits that are packed into words, in the orders of files, and the one order of frame.

frame keeps nibbles as int32 [N, K / 8]: word j of row n holds columns 8j to 8j + 7, the first in its lowest bits, each
stored as an unsigned code from 0 to 15. `frame.ops.unpack_nibbles` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Column in a run of eight that each nibble of a word of AWQ holds, from the lowest.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: Tensor, bits: int, count: int, order: Sequence[int] = ()) -> Tensor:
    """int32 [..., W] → uint8 [..., count]: codes of `bits` one after the other, the first in the lowest bits.

    Codes of 3, 5 or 6 bits may lie in two words. `order`[i] is the place, in a run of as many codes, of the i-th code
    that is found.
    """
    places = torch.arange(count, device=words.device) * bits
    word, shift = places // 32, places % 32
    wide = words.long() & 0xFFFFFFFF
    codes = wide[..., word] >> shift
    spilled = shift + bits > 32
    following = wide[..., (word + spilled).clamp_max(words.shape[-1] - 1)] << (32 - shift)
    codes = torch.where(spilled, codes | following, codes) & (2**bits - 1)
    return _ordered(codes, order).to(torch.uint8)


def pack(codes: Tensor, bits: int = 4) -> Tensor:
    """The inverse of `unpack` without an order: uint8 [..., count] → int32 [..., ⌈count · bits / 32⌉]."""
    count = codes.shape[-1]
    places = torch.arange(count, device=codes.device) * bits
    word, shift = places // 32, places % 32
    words = torch.zeros((*codes.shape[:-1], -(-count * bits // 32) + 1), dtype=torch.int64, device=codes.device)
    wide = codes.long() << shift
    words.index_add_(-1, word, wide & 0xFFFFFFFF)
    words.index_add_(-1, word + 1, wide >> 32)
    words = words[..., :-1]
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes from 0 to 15 [..., K] → int32 [..., K / 8], as frame keeps them; K is a multiple of 8."""
    words = torch.zeros((*codes.shape[:-1], codes.shape[-1] // 8), dtype=torch.int32, device=codes.device)
    for place in range(8):  # no wider than the result, so that a large tensor is packed beside few others
        words |= codes[..., place::8].to(torch.int32) << (4 * place)
    return words


def _ordered(codes: Tensor, order: Sequence[int]) -> Tensor:
    if not order:
        return codes
    found = torch.empty_like(codes)
    for place, column in enumerate(order):
        found[..., column :: len(order)] = codes[..., place :: len(order)]
    return found
