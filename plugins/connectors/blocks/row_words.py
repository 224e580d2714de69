"""Rows of bytes as rows of wider words, which a device moves by fewer threads."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16)


def in_words(*rows: Tensor) -> list[Tensor]:
    """The same rows, uint8 [n, bytes], of the widest words that all of them can be divided into where they lie."""
    for word in _WORDS:
        size = word.itemsize
        if all(
            one.stride(1) == 1
            and (one.shape[1] | one.stride(0) | one.data_ptr()) % size == 0
            and not int(one.storage_offset()) % size
            for one in rows
        ):
            return [one.view(word) for one in rows]
    return list(rows)
