"""Memory of a worker's device in which senders of its machine write blocks themselves. Knows no prompt."""

from __future__ import annotations

import secrets

from torch import Tensor

from ..blocks.host_arena import Arena
from ..blocks.host_slab import gib
from ..blocks.mapped_memory import PROBE_BYTES, Mapper, Offering, Sharing
from .wire import Offered

#: The name of this way between engines, where a sender is told that it may write.
DIRECT = "direct"
_ALIGNMENT = 256
#: Bytes of the device that are left to others.
_SPARE_BYTES = 512 << 20


class DeviceBuffer:
    """`num_bytes` for blocks, in `arena`, and in `scratch` a place for each of `most` senders to show that it writes.

    Raises `RuntimeError` or `ValueError` where the device has not got that, or others cannot map it.
    """

    def __init__(self, sharing: Sharing, machine: str, num_bytes: int, most: int) -> None:
        num_bytes -= num_bytes % _ALIGNMENT
        memory = device_memory(sharing, num_bytes + most * PROBE_BYTES)
        self.arena, self.scratch = Arena(memory[:num_bytes]), Arena(memory[num_bytes:])
        self._offering = Offering(sharing, machine, [memory])
        self._mapper = Mapper(sharing, machine)
        offer = self._offering.offer
        if self._mapper.read(offer.probed.address) != offer.probe:
            raise RuntimeError("what is read in this device's own memory is not what was written")

    def offered(self, scratch: Tensor) -> Offered:
        """What a new sender is told, which has that part of `scratch`; raises `RuntimeError`."""
        content = secrets.token_bytes(PROBE_BYTES)
        self._mapper.write(scratch.data_ptr(), content)
        return Offered(self._offering.offer, scratch.data_ptr(), content)

    def proves(self, scratch: Tensor, written: bytes) -> bool:
        """Whether a sender has written that; raises `RuntimeError`."""
        return self._mapper.read(scratch.data_ptr()) == written


def device_memory(sharing: Sharing, num_bytes: int) -> Tensor:
    """That many bytes of the device; raises `RuntimeError` where others would be left too few."""
    free = sharing.free_bytes()
    if free < num_bytes + _SPARE_BYTES:
        raise RuntimeError(f"{gib(free)} of the device's memory are free, {gib(num_bytes + _SPARE_BYTES)} are needed")
    return sharing.allocate(num_bytes)
