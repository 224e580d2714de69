"""Checksums of rows of bytes that any device computes fast: the sum of a row's words, each times an odd number.

All is modulo 2**64. A word that changed changes the sum, since an odd number has an inverse; that several changes
cancel out is as likely as 2**-64. It guards against accidents, not against who may write to the memory. Knows no block.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

#: Most bytes of a row that are multiplied at once: states of large models take hundreds of MiB.
PIECE_BYTES = 16 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class RowSums:
    """For rows of `row_bytes` on `device`."""

    def __init__(self, row_bytes: int, device: torch.device) -> None:
        size = math.gcd(row_bytes, 8)
        self._words = _WORDS[size]
        count = row_bytes // size
        self._count = min(count, PIECE_BYTES // size)
        self._weights = torch.from_numpy(_mixed(self._count)).to(device)
        # a piece's weights are those of the first, each times an odd number of the piece
        self._factors = [1, *_mixed(-(-count // max(1, self._count))).tolist()]

    def __call__(self, rows: Tensor) -> Tensor:
        """int64 [n] of `rows` uint8 [n, row_bytes], which lie one behind the other."""
        words = rows.view(self._words)
        first, *others = words.split(self._count, 1)
        total = self._sum(first)
        for factor, piece in zip(self._factors[1:], others, strict=False):
            total += self._sum(piece) * factor
        return total

    def _sum(self, words: Tensor) -> Tensor:
        weights = self._weights[: words.shape[1]]
        if words.device.type == "cpu" and words.dtype is torch.int64:
            return torch.mv(words, weights)
        return (words.to(torch.int64) * weights).sum(1)


def seal(row_sum: int, key: bytes, generation: int, part: int) -> int:
    """What stands for a row's content where it lies: 64 bits over its checksum and whose it is."""
    facts = b"%d:%d:%d:" % (row_sum & (1 << 64) - 1, generation, part)
    return int.from_bytes(hashlib.blake2b(facts + key, digest_size=8).digest(), "little")


def _mixed(count: int) -> np.ndarray:
    """So many odd numbers, int64: splitmix64 of 1, 2, …"""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
