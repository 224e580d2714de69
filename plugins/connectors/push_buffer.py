"""Memory of a worker's device in which senders of its machine write blocks themselves. Knows no prompt."""

from __future__ import annotations

import logging

from torch import Tensor

from .host_arena import Arena
from .host_slab import gib
from .mapped_memory import PROBE_BYTES, Mapper, Offering, Sharing
from .push_wire import Offered

logger = logging.getLogger("frame.connectors.push")

#: The name of this way between engines, where a sender is told that it may write.
DIRECT = "direct"
_ALIGNMENT = 256
#: Bytes of the device that are left to others.
_SPARE_BYTES = 512 << 20


class DeviceBuffer:
    """`num_bytes` for blocks, in `arena`, and for each of `most` senders a place in which it proves that it can write.

    Raises `RuntimeError` or `ValueError` where the device has not got that, or others cannot map it.
    """

    def __init__(self, sharing: Sharing, machine: str, num_bytes: int, most: int) -> None:
        num_bytes -= num_bytes % _ALIGNMENT
        memory = device_memory(sharing, num_bytes + most * PROBE_BYTES)
        self.arena, self._scratch = Arena(memory[:num_bytes]), Arena(memory[num_bytes:])
        self._offering = Offering(sharing, machine, [memory])
        self._mapper = Mapper(sharing, machine)
        offer = self._offering.offer
        if self._mapper.read(offer.probed.address) != offer.probe:
            raise RuntimeError("what is read in this device's own memory is not what was written")

    def offered(self) -> tuple[Tensor, Offered] | None:
        """A place for a new sender's proof, and what it is told; None where too many have one."""
        scratch = self._scratch.take(PROBE_BYTES)
        return None if scratch is None else (scratch, Offered(self._offering.offer, scratch.data_ptr()))

    def proves(self, scratch: Tensor, written: bytes) -> bool:
        """Whether a sender has written that."""
        return self._mapper.read(scratch.data_ptr()) == written

    def give_back(self, scratch: Tensor) -> None:
        """The sender is gone that had that place."""
        self._scratch.give_back(scratch)


def device_memory(sharing: Sharing, num_bytes: int) -> Tensor:
    """That many bytes of the device; raises `RuntimeError` where others would be left too few."""
    free = sharing.free_bytes()
    if free < num_bytes + _SPARE_BYTES:
        raise RuntimeError(f"{gib(free)} of the device's memory are free, {gib(num_bytes + _SPARE_BYTES)} are needed")
    return sharing.allocate(num_bytes)
