"""A checksum of device memory that costs one reading of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

#: Words of 8 bytes of which the device makes one sum.
_WORDS = 8192


def checksum(parts: Iterable[Tensor]) -> str:
    """A digest of the sums, modulo 2^64, of runs of 64 KiB of each uint8 tensor, in order.

    It finds what was written by mistake or moved; it is no protection against who wants to deceive.
    """
    sums = []
    for part in parts:
        whole = len(part) // 8 * 8
        words = part[:whole].view(torch.int64)
        runs = len(words) // _WORDS * _WORDS
        sums.append(words[:runs].view(-1, _WORDS).sum(1))
        sums.append(words[runs:].sum().view(1))
        sums.append(part[whole:].sum(dtype=torch.int64).view(1))
    joined = torch.cat(sums).cpu() if sums else torch.empty(0)
    return hashlib.sha256(joined.numpy().tobytes()).hexdigest()
