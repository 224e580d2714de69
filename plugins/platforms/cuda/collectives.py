"""The process groups of CUDA devices: NCCL, and for sums kernels over peer memory, or copies of two devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frame.interfaces import HostGroup, NormLayer, Placement
from frame.kernels import all_reduce as kernels, join
from frame.ops import Ops

from ..torch_collectives import GroupOwner, TorchCollectives, TorchGroup, nccl_group
from .laps import Laps
from .peer_copies import COPIED_BYTES, PeerCopies, copied_parts
from .peer_memory import MAX_RANKS, PeerMemory, PeerMemoryError

logger = logging.getLogger("frame.platforms.cuda")

#: Bytes by number of ranks above which NCCL sums sooner than the kernels; measured, see benchmarks/README.md.
MOST_BYTES = {2: 16 << 20}
_MOST_BYTES_OF_OTHERS = 1 << 20
#: Bytes of the parts of a sum by NCCL that begin while the product of the next part is computed.
OVERLAP_BYTES = 16 << 20


class CudaCollectives(TorchCollectives):
    """NCCL between devices; the tensor group also has peer memory where the devices reach each other's."""

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        ops: Ops,
        *,
        shares_memory: bool = True,
        copies_sums: bool = False,
    ) -> None:
        super().__init__(placement, partial(nccl_group, device))
        self._device = device
        self._ops = ops
        self._shares_memory, self._copies_sums = shares_memory, copies_sums
        self._memories: list[PeerMemory] = []

    def group(self, name: str, ranks: Sequence[int]) -> TorchGroup:
        laps = Laps()
        made = super().group(name, ranks)
        laps.end("NCCL")
        if name == "tensor":
            made = self._with_memory(made)
            laps.end("peer memory")
        logger.info("%s group of %d: %s", name, made.size, laps)
        return made

    def _with_memory(self, made: TorchGroup) -> TorchGroup:
        """The tensor group `made` with peer memory, where the devices have it."""
        made.overlap_bytes = OVERLAP_BYTES
        if not self._shares_memory:
            logger.info("sums over the tensor group: NCCL (peer_memory is off)")
            return made
        if made.size > MAX_RANKS:
            logger.info("sums over the tensor group: NCCL (%d ranks; the kernels serve %d)", made.size, MAX_RANKS)
            return made
        try:
            copied = COPIED_BYTES if self._copies_sums and made.size == 2 else 0
            memory = PeerMemory(self._device, made.rank, made.size, made.host, copied_bytes=copied)
        except PeerMemoryError as error:
            logger.warning("sums over the tensor group: NCCL, which is slower for few tokens: %s", error)
            return made
        self._memories.append(memory)
        parts = made.name, made.rank, made.size, made.communicator, made.host, self
        copies = PeerCopies(memory) if copied else None
        group = PeerGroup(*parts, memory.buffers, self._ops, copies)
        group.overlap_bytes = OVERLAP_BYTES
        larger = f"copies between devices up to {COPIED_BYTES >> 10} KiB, " if copies else ""
        logger.info("sums over the tensor group: kernels up to %d KiB, %sthen NCCL", group.most_bytes >> 10, larger)
        return group

    def close(self) -> None:
        super().close()
        memories, self._memories = self._memories, []
        for memory in memories:
            memory.close()


class PeerGroup(TorchGroup):
    """Sums by kernels over peer memory what fits there, alone or with the norm that follows.

    Two ranks sum larger tensors by copies, which run beside the product that makes the values; the rest is NCCL's.
    Where bits must not depend on the batch, the kernels sum everything, in parts, and norms are kernels of their own.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        communicator: Any,
        host: HostGroup,
        owner: GroupOwner,
        buffers: kernels.PeerBuffers,
        ops: Ops,
        copies: PeerCopies | None = None,
    ) -> None:
        super().__init__(name, rank, size, communicator, host, owner)
        self._buffers = buffers
        self._copies = copies
        self._ops = ops
        self.most_bytes = min(buffers.plain_bytes, MOST_BYTES.get(self.size, _MOST_BYTES_OF_OTHERS))

    def parts_of(self, num_rows: int, row_bytes: int, inner: int = 0) -> list[slice]:
        if self._copies is None or not self.most_bytes < num_rows * row_bytes <= COPIED_BYTES:
            return super().parts_of(num_rows, row_bytes)
        return copied_parts(num_rows, row_bytes, inner)

    def begin_all_reduce(self, tensor: Tensor, rows: slice) -> None:
        if self._copies is None or not self._copies.takes(tensor) or tensor.nbytes <= self.most_bytes:
            super().begin_all_reduce(tensor, rows)
        elif not self._owner.is_silent:
            self._copies.begin(tensor, rows)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        silent = self._owner.is_silent
        if tensor.nbytes <= self.most_bytes and kernels.why_not_reduced(tensor, self._buffers) is None:
            return kernels.all_reduce(tensor, self._buffers, rehearsed=silent)
        if self._ops.invariant and tensor.is_contiguous() and tensor.dim() > 1 and len(tensor) > 1:
            half = len(tensor) // 2
            return torch.cat((self.all_reduce(tensor[:half]), self.all_reduce(tensor[half:])))
        if (copies := self._copied(tensor)) is not None:
            return copies.all_reduce(tensor, rehearsed=silent)
        return super().all_reduce(tensor)

    def all_reduce_normed(self, x: Tensor, residual: Tensor, norm: NormLayer) -> tuple[Tensor, Tensor]:
        if self._ops.invariant:
            return norm(self.all_reduce(x), residual)
        if not self._takes_norm(x, residual, norm):
            if (copies := self._copied(x)) is None:
                return super().all_reduce_normed(x, residual, norm)
            if not _alike(x, residual, norm):
                return norm(copies.all_reduce(x, rehearsed=self._owner.is_silent), residual)
            return copies.all_reduce_normed(x, residual, norm, rehearsed=self._owner.is_silent)
        return kernels.all_reduce_normed(x, residual, norm.given, self._buffers, rehearsed=self._owner.is_silent)

    def join_best(self, scores: Tensor, token_ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        if not join.takes(len(scores), self._buffers):
            return None
        return join.exchange_best(scores, token_ids, logits, self._buffers, rehearsed=self._owner.is_silent)

    def _takes_norm(self, x: Tensor, residual: Tensor, norm: NormLayer) -> bool:
        if x.nbytes > self.most_bytes or x.dim() != 2 or x.shape[-1] * x.dtype.itemsize % 16:
            return False
        return _alike(x, residual, norm) and kernels.why_not_reduced(x, self._buffers) is None

    def _copied(self, tensor: Tensor) -> PeerCopies | None:
        """What sums `tensor` by copies, or None."""
        if self._copies is None or self._ops.invariant or tensor.data_ptr() in self._begun:
            return None
        if not self._copies.takes(tensor):
            return None
        if not self._owner.is_silent:
            self._owner.count(self.name)
        return self._copies


def _alike(x: Tensor, residual: Tensor, norm: NormLayer) -> bool:
    same = residual.dtype == x.dtype == norm.given[0].dtype
    return same and x.dim() == 2 and residual.is_contiguous() and x.is_contiguous()
