"""Copies of many pieces of memory by one launch, on devices that have a kernel for it. Knows no block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Bytes of a piece at most: longer ones are divided, as the kernel takes equally long over each.
_PIECE_BYTES = 128 << 10


def has_kernel(device: torch.device) -> bool:
    """Whether `copy_pieces` runs on `device`."""
    return device.type == "cuda"


def copy_pieces(
    table: np.ndarray,
    device: torch.device,
    *,
    behind: np.ndarray | None = None,
    finite: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Launches a copy on the current stream: `table` int64 [n, 4] and the rest are those of the kernel.

    With `behind` int64 [m, 4] each of these rows is added to all of the table, which is copied m times: on the device,
    as it takes the host long to write many rows.

    Raises `ValueError` where addresses and sizes do not suit values of `dtype`.
    """
    from frame.kernels import block_copies

    if not len(table):
        return
    table = _divided(table)
    every = int(np.bitwise_or.reduce(table[:, :3], axis=None))
    if behind is None:
        staged = torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
    else:
        every |= int(np.bitwise_or.reduce(behind[:, :3], axis=None))
        both = torch.from_numpy(np.concatenate([behind, table])).pin_memory().to(device, non_blocking=True)
        staged = (both[: len(behind), None] + both[len(behind) :]).view(-1, 4)
    most, unit = int(table[:, 2].max()), min(16, every & -every)
    block_copies.copy_pieces(staged, most, unit, finite=finite, dtype=dtype)


def _divided(table: np.ndarray) -> np.ndarray:
    """The same copies, none of them longer than `_PIECE_BYTES`."""
    counts = -(-table[:, 2] // _PIECE_BYTES)
    if (counts == 1).all():
        return table
    divided = np.repeat(table, counts, axis=0)
    starts = np.arange(len(divided)) - np.repeat(np.cumsum(counts) - counts, counts)
    divided[:, :2] += (starts * _PIECE_BYTES)[:, None]
    divided[:, 2] = np.minimum(divided[:, 2] - starts * _PIECE_BYTES, _PIECE_BYTES)
    return divided
