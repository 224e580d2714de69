"""A checksum of device memory, which the device makes where it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

#: Words of 8 bytes in a row, of which the device makes one sum.
_WORDS = 8192
#: Rows that are read at a time, for the sums of rows and of columns: what was read once is in a cache the second time.
_ROWS = 256


def checksum(parts: Iterable[Tensor]) -> str:
    """A digest of sums modulo 2^64: of each row of 64 KiB of each uint8 tensor, in order, and of each column of all.

    It finds what was written by mistake or moved, also within a row; it is no protection against who wants to deceive.
    """
    sums, columns = list[Tensor](), None
    for part in parts:
        whole = len(part) // 8 * 8
        words = part[:whole].view(torch.int64)
        if columns is None:
            columns = words.new_zeros(_WORDS)
        full = len(words) // _WORDS * _WORDS
        for rows in words[:full].view(-1, _WORDS).split(_ROWS):
            sums.append(rows.sum(1))
            columns += rows.sum(0)
        rest = words[full:]
        columns[: len(rest)] += rest
        sums += [rest.sum().view(1), part[whole:].sum(dtype=torch.int64).view(1)]
    joined = torch.empty(0) if columns is None else torch.cat([*sums, columns]).cpu()
    return hashlib.sha256(joined.numpy().tobytes()).hexdigest()
