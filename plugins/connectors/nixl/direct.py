"""Reads of blocks that lie in another GPU of this machine: a kernel copies them, one launch for all.

NIXL's UCX takes a call for each block of each layer, thousands for a long prompt. Where this process can map the other
one's memory, and what it reads there is what the other side wrote, a kernel of this device reads it instead; NIXL then
carries the notices only. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from frame.interfaces import Mark

from ..blocks.mapped_memory import Mapper, Offer, Offering, Opened, Sharing
from .maps import LayerRows

logger = logging.getLogger("frame.connectors.nixl")

#: Bytes over which the blocks of a layer may spread.
_MAX_SPAN = 1 << 62


class Direct:
    """A worker's regions as others may map them (`offer`, None where they cannot), and theirs as this one does."""

    def __init__(self, sharing: Sharing, machine: str, regions: Sequence[Tensor]) -> None:
        self._sharing = sharing
        self._machine = machine
        self._mapper = Mapper(sharing, machine, self._read_one)
        self._offering: Offering | None = None
        try:
            self._offering = Offering(sharing, machine, regions)
        except (RuntimeError, ValueError) as error:
            logger.info("other engines of this machine read blocks here through NIXL alone: %s", error)

    @property
    def offer(self) -> Offer | None:
        """What others may map."""
        return None if self._offering is None else self._offering.offer

    def open(self, offer: Offer | None) -> Opened | None:
        """Another worker's memory; None where this one cannot map it, or does not read there what that one wrote."""
        if offer is None or offer.machine != self._machine or self._offering is None:
            return None
        try:
            return self._mapper.open(offer)
        except (RuntimeError, ValueError) as error:
            logger.info("blocks of another engine of this machine are read through NIXL: %s", error)
            return None

    def read(self, opened: Opened, parts: Sequence[LayerRows]) -> Mark:
        """Begins to read; raises `ValueError` for what is not in memory that the other worker offered.

        Nothing is under way when it raises. What is read of a layer must be in one of the regions.
        """
        copies, mark = [_copies(opened, part) for part in parts if len(part)], Mark()
        try:
            for pieces, layers in copies:
                mark = self._sharing.copy(pieces, layers)  # behind those before it
        except BaseException:
            mark.wait()
            raise
        return mark

    def _read_one(self, source: int, target: int, num_bytes: int) -> Mark:
        """By the kernel that reads blocks."""
        return self._sharing.copy(np.array([[source, target, num_bytes, 0]], np.int64))


def _copies(opened: Opened, part: LayerRows) -> tuple[np.ndarray, np.ndarray]:
    """The pieces and layers of `Sharing.copy`."""
    rows, (ours, theirs) = part.pieces, part.addresses.T
    nothing, ends = np.zeros_like(rows.sizes), rows.theirs + rows.sizes
    first, last = int(rows.theirs.min()), int(ends.max())
    if last - first > _MAX_SPAN or (ends < rows.theirs).any():  # sums of int64 begin anew at the other end
        raise ValueError("blocks lie outside of any memory")
    here = opened.addresses(theirs + first, np.full_like(theirs, last - first)) - first
    pieces = np.stack([rows.theirs, rows.ours, rows.sizes, nothing], axis=1)
    return pieces, np.stack([here, ours, np.zeros_like(ours), np.zeros_like(ours)], axis=1)
