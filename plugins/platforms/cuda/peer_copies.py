"""Sums of two ranks by copies between their devices, which run beside what a device computes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from frame.interfaces import NormLayer
from frame.kernels import peer_copies as kernels
from frame.kernels.peer_memory import check, driver

from .peer_memory import PeerMemory

#: Bytes of the largest sum: what one device keeps for the other's values.
COPIED_BYTES = 128 << 20
#: Types of the values that can be summed.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PeerCopies:
    """Carries this rank's part of a sum to the other rank, in parts if it is begun, and adds what that rank sent.

    All calls enter the current stream; copies run on a stream of their own. One sum at a time.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self._buffers, self._their_memory = memory.copy_buffers()
        self._stream = torch.cuda.Stream(memory.device, priority=-1)  # its kernels of one program wait for no product
        self._begun = 0  # the address of the tensor whose sum has begun, or 0

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
