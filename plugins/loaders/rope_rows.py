"""Rows of queries and keys that a file has in the order of interleaved rotary positions, in that of half-split ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import LazyTensor


def half_split(num_rows: int, heads: int) -> np.ndarray[Any, Any]:
    """Where each row lies in the file, which has the rows of a head's two halves in turn."""
    return np.arange(num_rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


class HalfSplitTensor(LazyTensor):
    """A tensor under another name, the rows of whose `heads` are put into order; 0 leaves them."""

    def __init__(self, tensor: LazyTensor, name: str, heads: int = 0) -> None:
        self._tensor, self.name, self._heads = tensor, name, heads
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read(self, index: tuple[slice, ...] = ()) -> Tensor:
        if not self._heads:
            return self._tensor.read(index)
        rows = half_split(self.shape[0], self._heads)[index[0] if index else slice(None)]
        first = int(rows.min())
        found = self._tensor.read((slice(first, int(rows.max()) + 1), *index[1:]))
        return found[torch.from_numpy(rows - first)]
