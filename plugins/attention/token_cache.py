"""A layer's KV cache seen token by token: storing at slots, reading back runs or lists of slots.

A slot is block · block_size + offset. Knows no row and no attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frame.kernels.native.rows import NativeRows
from frame.ops import quantize_kv


class Workspace:
    """Memory that gathers write into, kept between calls: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, size: int, like: Tensor) -> Tensor:
        """`size` elements of `like`'s dtype and device, valid until the next call."""
        if self._memory.numel() < size or self._memory.dtype != like.dtype or self._memory.device != like.device:
            self._memory = torch.empty(size + size // 4, dtype=like.dtype, device=like.device)
        return self._memory[:size]


class TokenCache:
    """Views of one layer's cache [2, num_blocks, block_size, Hk, D] that lies in memory block by block.

    Where a block's tokens follow each other at even distances and blocks without a gap, a slot is a row of one
    matrix; elsewhere slots are split into block and offset at each access.
    """

    def __init__(self, kv_cache: Tensor, workspace: Workspace, native: NativeRows | None = None) -> None:
        self.dtype = kv_cache.dtype
        # torch moves 8-bit floats only as bytes
        moved = kv_cache.view(torch.uint8) if self.dtype.itemsize == 1 else kv_cache
        self._tokens = moved.permute(1, 2, 0, 3, 4)
        self._block_size = kv_cache.shape[2]
        self._row_shape = tuple(self._tokens.shape[2:])
        self._workspace = workspace
        self.flat = self._tokens.is_contiguous()
        #: keys and values of the blocks [num_blocks, block_size, Hk, D], which kernels read and write where they lie
        self.blocks = kv_cache[0], kv_cache[1]
        self._native = native
        if self.flat:
            rows = self._tokens.view(-1, *self._row_shape)
            self._rows, self._row_size = rows.flatten(1), rows[0].numel()
            self._keys, self._values = rows[:, 0], rows[:, 1]
            self.keys, self.values = self._keys.view(self.dtype), self._values.view(self.dtype)

    def store(self, key: Tensor, value: Tensor, slots: Tensor, scales: tuple[float | Tensor, float | Tensor]) -> None:
        """Writes `key`, `value` [n, Hk, D] at `slots` [n]; `scales` are those of a cache of 8-bit floats."""
        plain = key.dtype == value.dtype == self.dtype and slots.is_contiguous() and _by_heads(key) and _by_heads(value)
        if self._native is not None and plain:
            self._native.store(key, value, slots, *self.blocks)
            return
        if key.dtype != self.dtype:
            key, value = (quantize_kv(x, self.dtype, scale) for x, scale in zip((key, value), scales, strict=True))
        key, value = key.view(self._tokens.dtype), value.view(self._tokens.dtype)
        if self.flat:
            self._keys.index_copy_(0, slots, key)
            self._values.index_copy_(0, slots, value)
            return
        block, offset = slots // self._block_size, slots % self._block_size
        self._tokens[block, offset, 0] = key
        self._tokens[block, offset, 1] = value

    def gather(self, slots: Tensor) -> Tensor:
        """[n, 2, Hk, D] at `slots` [n], valid until the next gather of this group."""
        if not self.flat:
            return self._tokens[slots // self._block_size, slots % self._block_size].view(self.dtype)
        count = slots.shape[0]
        out = self._workspace.take(count * self._row_size, self._rows).view(count, self._row_size)
        return torch.index_select(self._rows, 0, slots, out=out).view(count, *self._row_shape).view(self.dtype)


def _by_heads(x: Tensor) -> bool:
    """Whether the heads of each token [n, H, D] lie one behind the other."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
