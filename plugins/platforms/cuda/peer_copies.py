"""Sums of two ranks by copies between their devices, which run beside what a device computes."""

from __future__ import annotations

import ctypes
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from frame.interfaces import NormLayer
from frame.kernels import peer_copies as kernels
from frame.kernels.peer_memory import check, driver

#: Bytes of the largest sum: what one device keeps for the other's values.
COPIED_BYTES = 128 << 20
#: Parts of a sum, and bytes of one at least; its rows are a multiple, as products compute so many at once.
_MOST_PARTS, _LEAST_BYTES, _ROWS = 4, 4 << 20, 256
#: Products of which a value is the sum where a device computes it in the time of its copy: a Hopper chip, NVLink 4.
_HIDING_PRODUCTS = 1800
#: Types of the values that can be summed.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def copied_parts(num_rows: int, row_bytes: int, inner: int) -> list[slice]:
    """The parts of a sum of values of which each is the sum of `inner` products; empty where one part is best.

    A part may be as much smaller than the one before as its product takes longer than its copy: the copy of each part
    but the last, which is small, then lies beside the product of the next one.
    """
    shrinks = min(4.0, max(1.0, inner / _HIDING_PRODUCTS))
    shares = [shrinks**-place for place in range(min(_MOST_PARTS, num_rows * row_bytes // _LEAST_BYTES))]
    least = max(_ROWS, -(-_LEAST_BYTES // row_bytes // _ROWS) * _ROWS)
    ends = [0]
    for share in accumulate(shares):
        end = round(num_rows * share / sum(shares) / _ROWS) * _ROWS
        if end - ends[-1] >= least and num_rows - end >= least:
            ends.append(end)
    return [slice(first, end) for first, end in pairwise([*ends, num_rows])] if len(ends) > 1 else []


class CopiedMemory(Protocol):
    """What two ranks share: `peer_memory.PeerMemory`, or a stand-in for it where steps are only rehearsed."""

    device: torch.device

    def copy_buffers(self) -> tuple[kernels.CopyBuffers, int]:
        """The buffers of this rank, and the address of the other rank's memory for this one's values."""


class PeerCopies:
    """Carries this rank's part of a sum to the other rank, in parts if it is begun, and adds what that rank sent.

    All calls enter the current stream; copies run on a stream of their own. One sum at a time.
    """

    def __init__(self, memory: CopiedMemory) -> None:
        self._device = memory.device
        self._buffers, self._their_memory = memory.copy_buffers()
        self._begun = 0  # the address of the tensor whose sum has begun, or 0

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=-1)  # its kernels of one program wait for no product

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` can be summed."""
        fits = 0 < tensor.nbytes <= COPIED_BYTES and tensor.dtype in DTYPES and tensor.is_contiguous()
        return fits and (not self._begun or self.has_begun(tensor))

    def has_begun(self, tensor: Tensor) -> bool:
        """Whether parts of `tensor` are on their way."""
        return self._begun == tensor.data_ptr()

    def begin(self, tensor: Tensor, rows: slice) -> None:
        """Sends `tensor[rows]`, which stays as it is until the sum has ended."""
        part = tensor[rows]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if not self._begun:
                self._begun = tensor.data_ptr()
                kernels.await_taken(self._buffers)
            target = self._their_memory + part.data_ptr() - tensor.data_ptr()
            copied = (ctypes.c_uint64(target), ctypes.c_uint64(part.data_ptr()), ctypes.c_size_t(part.nbytes))
            check("cuMemcpyAsync", driver().cuMemcpyAsync(*copied, ctypes.c_void_p(self._stream.cuda_stream)))

    def all_reduce(self, tensor: Tensor, *, rehearsed: bool) -> Tensor:
        """The sum over both ranks: in place if it was begun, else a new tensor."""
        out = tensor if self.has_begun(tensor) else torch.empty_like(tensor)
        self._complete(tensor, rehearsed=rehearsed)
        return kernels.add_received(tensor, self._buffers, out, rehearsed=rehearsed)

    def all_reduce_normed(
        self, x: Tensor, residual: Tensor, norm: NormLayer, *, rehearsed: bool
    ) -> tuple[Tensor, Tensor]:
        """As `ProcessGroup.all_reduce_normed`."""
        self._complete(x, rehearsed=rehearsed)
        return kernels.add_received_normed(x, residual, norm.given, self._buffers, rehearsed=rehearsed)

    def _complete(self, tensor: Tensor, *, rehearsed: bool) -> None:
        """Sends what has not been sent, and orders what follows behind it."""
        if rehearsed:
            kernels.await_taken(self._buffers, rehearsed=True)
            kernels.tell_arrived(self._buffers, rehearsed=True)
            return
        if not self._begun:
            self.begin(tensor, slice(None))
        with torch.cuda.stream(self._stream):
            kernels.tell_arrived(self._buffers)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._begun = 0
