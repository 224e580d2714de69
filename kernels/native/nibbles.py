"""Weights of 4-bit codes, as the kernels in C take them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

#: As in the sources: types of scales of groups; then of bytes of 32 columns, and signed ones of 16.
_GROUPS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OF_BYTES, _OF_SIGNED = 3, 4


class _Struct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "scales", "zeros", "minima", "outer")),
        *((name, ctypes.c_long) for name in ("bits", "kind", "group", "zero")),
    )


@dataclass(frozen=True)
class NibbleWeight:
    """A weight [N, K], K a multiple of 32: codes int32 `low` [N, K / 8], eight to a word, and further bits in `high`.

    Without `outer`, (code - zero) · scale: `scales` [N, K / g] of groups of a multiple of 32 columns, and `zeros` of
    that shape, uint8, in the place of `zero`. With `outer` float16 [N, K / 256, 2] scales and `minima` are uint8
    [N, K / 32]: code · scale · outer[0] - minimum · outer[1]; or, [N, K / 256, 1], scales are int8 [N, K / 16].
    """

    low: Tensor
    scales: Tensor
    high: Tensor | None = None
    zeros: Tensor | None = None
    minima: Tensor | None = None
    outer: Tensor | None = None
    zero: int = 8

    @property
    def fits(self) -> bool:
        """Whether the kernels take such a weight."""
        columns = 8 * self.low.shape[1]
        given = [
            one for one in (self.low, self.scales, self.high, self.zeros, self.minima, self.outer) if one is not None
        ]
        if columns % 32 or self.low.dtype != torch.int32 or not all(one.is_contiguous() for one in given):
            return False
        if self.outer is not None:
            return columns % 256 == 0
        if self.scales.dtype not in _GROUPS or columns % self.scales.shape[1]:
            return False
        return columns // self.scales.shape[1] % 32 == 0 and (self.zeros is None or self.zeros.itemsize == 1)

    def struct(self) -> ctypes.c_void_p:
        """A pointer to what the functions read, good for as long as it is held."""
        columns, group, bits = 8 * self.low.shape[1], 0, 0
        if self.outer is None:
            kind, group = _GROUPS[self.scales.dtype], columns // self.scales.shape[1]
        else:
            kind = _OF_SIGNED if self.minima is None else _OF_BYTES
        if self.high is not None:
            bits = 32 * self.high.shape[1] // columns
        parts = (self.low, self.high, self.scales, self.zeros, self.minima, self.outer)
        addresses = (None if one is None else one.data_ptr() for one in parts)
        made = _Struct(*addresses, bits, kind, group, self.zero)
        pointer = ctypes.cast(ctypes.pointer(made), ctypes.c_void_p)
        pointer.held = made  # type: ignore[attr-defined]
        return pointer
