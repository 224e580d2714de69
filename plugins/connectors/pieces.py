"""Copies of many pieces of memory by one launch, on devices that have a kernel for it. Knows no block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def has_kernel(device: torch.device) -> bool:
    """Whether `copy_pieces` runs on `device`."""
    return device.type == "cuda"


def checked_types() -> frozenset[torch.dtype]:
    """The types whose values `copy_pieces` can look at."""
    from frame.kernels import block_copies

    return block_copies.CHECKED


def copy_pieces(
    table: np.ndarray,
    device: torch.device,
    *,
    to_host: bool,
    finite: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Launches a copy on the current stream: `table` int64 [n, 4] is that of the kernel.

    `to_host` says that one side is host memory, which is pinned. Raises `ValueError` where addresses and sizes do not
    suit values of `dtype`.
    """
    from frame.kernels import block_copies

    if not len(table):
        return
    every = int(np.bitwise_or.reduce(table[:, :3], axis=None))
    programs = block_copies.HOST_PROGRAMS if to_host else block_copies.PEER_PROGRAMS
    staged = torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
    most, unit = int(table[:, 2].max()), min(16, every & -every)
    block_copies.copy_pieces(staged, most, unit, programs=programs, finite=finite, dtype=dtype)
