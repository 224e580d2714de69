"""The process groups of CUDA devices: NCCL, and for sums of what fits their buffers kernels over peer memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import HostGroup, NormLayer, Placement
from frame.kernels import all_reduce as kernels
from frame.ops import Ops

from ..torch_collectives import TorchCollectives, TorchGroup, nccl_group
from .peer_memory import MAX_RANKS, PeerMemory, PeerMemoryError

logger = logging.getLogger("frame.platforms.cuda")

#: Bytes by number of ranks above which NCCL sums sooner than the kernels; measured, see benchmarks/README.md.
MOST_BYTES = {2: 16 << 20}
_MOST_BYTES_OF_OTHERS = 1 << 20
#: Bytes of the parts of a sum by NCCL that begin while the product of the next part is computed.
OVERLAP_BYTES = 16 << 20


class CudaCollectives(TorchCollectives):
    """NCCL between devices; the tensor group also has peer memory where the devices reach each other's."""

    def __init__(self, placement: Placement, device: torch.device, ops: Ops, *, shares_memory: bool = True) -> None:
        super().__init__(placement, partial(nccl_group, device))
        self._device = device
        self._ops = ops
        self._shares_memory = shares_memory
        self._memories: list[PeerMemory] = []

    def group(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        made = super().group(name, ranks)
        if name != "tensor":
            return made
        made.overlap_bytes = OVERLAP_BYTES
        if not self._shares_memory:
            logger.info("sums over the tensor group: NCCL (peer_memory is off)")
            return made
        if made.size > MAX_RANKS:
            logger.info("sums over the tensor group: NCCL (%d ranks; the kernels serve %d)", made.size, MAX_RANKS)
            return made
        try:
            memory = PeerMemory(self._device, made.rank, made.size, made.host)
        except PeerMemoryError as error:
            logger.warning("sums over the tensor group: NCCL, which is slower for few tokens: %s", error)
            return made
        self._memories.append(memory)
        parts = made.name, made.rank, made.size, made.communicator, made.host, self
        group = PeerGroup(*parts, memory.buffers, self._ops)
        group.overlap_bytes = OVERLAP_BYTES
        logger.info("sums over the tensor group: kernels up to %d KiB, then NCCL", group.most_bytes >> 10)
        return group

    def close(self) -> None:
        super().close()
        memories, self._memories = self._memories, []
        for memory in memories:
            memory.close()


class PeerGroup(TorchGroup):
    """Sums by kernels over peer memory what fits there, alone or with the norm that follows; the rest by NCCL.

    Where bits must not depend on the batch, the kernels sum everything, in parts, and norms are kernels of their own.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        communicator: Any,
        host: HostGroup,
        owner: TorchCollectives,
        buffers: kernels.PeerBuffers,
        ops: Ops,
    ) -> None:
        super().__init__(name, rank, size, communicator, host, owner)
        self._buffers = buffers
        self._ops = ops
        self.most_bytes = min(buffers.plain_bytes, MOST_BYTES.get(self.size, _MOST_BYTES_OF_OTHERS))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        silent = self._owner.is_silent
        if tensor.nbytes <= self.most_bytes and kernels.why_not_reduced(tensor, self._buffers) is None:
            return kernels.all_reduce(tensor, self._buffers, rehearsed=silent)
        if self._ops.invariant and tensor.is_contiguous() and tensor.dim() > 1 and len(tensor) > 1:
            half = len(tensor) // 2
            return torch.cat((self.all_reduce(tensor[:half]), self.all_reduce(tensor[half:])))
        return super().all_reduce(tensor)

    def all_reduce_normed(self, x: Tensor, residual: Tensor, norm: NormLayer) -> tuple[Tensor, Tensor]:
        if self._ops.invariant:
            return norm(self.all_reduce(x), residual)
        if not self._takes_norm(x, residual, norm):
            return super().all_reduce_normed(x, residual, norm)
        return kernels.all_reduce_normed(x, residual, norm.given, self._buffers, rehearsed=self._owner.is_silent)

    def _takes_norm(self, x: Tensor, residual: Tensor, norm: NormLayer) -> bool:
        if x.nbytes > self.most_bytes or x.dim() != 2 or x.shape[-1] * x.dtype.itemsize % 16:
            return False
        same = residual.dtype == x.dtype == norm.given[0].dtype and residual.is_contiguous()
        return same and kernels.why_not_reduced(x, self._buffers) is None
