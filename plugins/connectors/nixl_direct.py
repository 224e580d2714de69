"""Reads of blocks that lie in another GPU of this machine: a kernel copies them, one launch for all.

NIXL's UCX takes a call for each block of each layer, thousands for a long prompt. Where this process can map the other
one's memory, and what it reads there is what the other side wrote, a kernel of this device reads it instead; NIXL then
carries the notices only. Knows no request.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Mark

from .nixl_maps import Rows
from .pieces import copy_pieces

logger = logging.getLogger("frame.connectors.nixl")

_PROBE_BYTES = 256
#: Regions of one worker, and bytes of a handle.
MAX_REGIONS, _MAX_HANDLE = 256, 256


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a worker, by the address that it has there, and the handle by which others of its machine map it."""

    address: int
    size: int
    handle: bytes


class Offer(msgspec.Struct, frozen=True):
    """What a worker lets others of its machine map: its regions, and one more whose content is `probe`."""

    machine: str
    regions: list[Region]
    probed: Region
    probe: bytes

    def __post_init__(self) -> None:
        handles = [region.handle for region in (*self.regions, self.probed)]
        if len(handles) > MAX_REGIONS or any(len(handle) > _MAX_HANDLE for handle in handles):
            raise ValueError("a worker offers more memory than it may")
        if len(self.probe) != _PROBE_BYTES or self.probed.size < _PROBE_BYTES:
            raise ValueError("a worker offers no probe of its memory")


class Sharing(ABC):
    """How processes of one machine reach each other's memory of a device."""

    @abstractmethod
    def export(self, region: Tensor) -> bytes:
        """A handle of the memory of a tensor; raises `RuntimeError` where there can be none."""

    @abstractmethod
    def open(self, handle: bytes) -> tuple[int, int]:
        """The address here, and the bytes, of memory that another process exported; raises `RuntimeError`."""

    @abstractmethod
    def release(self, handle: bytes) -> None:
        """Gives back what `open` gave, once for each time; nothing reads it any more."""

    @abstractmethod
    def copy(self, table: np.ndarray) -> Mark:
        """Begins to copy: `table` int64 [n, 4] has the address of each piece, that of its copy, its bytes, 0."""


class CudaSharing(Sharing):
    """By the driver's handles, and a kernel on a stream of its own that waits for no step."""

    def __init__(self, device: torch.device) -> None:
        from frame.kernels import shared_memory

        self._export = shared_memory.export
        self._memory = shared_memory.SharedMemory(device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def export(self, region: Tensor) -> bytes:
        torch.cuda.synchronize(self._device)  # what the region holds now is there for others
        return self._export(region)

    def open(self, handle: bytes) -> tuple[int, int]:
        return self._memory.open(handle)

    def release(self, handle: bytes) -> None:
        self._memory.release(handle)

    def copy(self, table: np.ndarray) -> Mark:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy_pieces(table, self._device)
            return _Passed(self._stream.record_event())


class _Passed(Mark):
    """Once an event is passed."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


def sharing_of(device: torch.device) -> Sharing | None:
    """How memory of `device` is shared; None where it is not."""
    return CudaSharing(device) if device.type == "cuda" else None


class Direct:
    """A worker's regions as others may map them (`offer`, None where they cannot), and theirs as this one does."""

    def __init__(self, sharing: Sharing, machine: str, regions: Sequence[Tensor], device: torch.device) -> None:
        self._sharing = sharing
        self._machine = machine
        self._probe = torch.frombuffer(bytearray(secrets.token_bytes(_PROBE_BYTES)), dtype=torch.uint8).to(device)
        # in host memory, as copies wait for no step: what a step used, or is to fill, may not be their target
        self._found = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.offer: Offer | None = None
        try:
            exported = [_region(sharing, tensor) for tensor in (*regions, self._probe)]
            self.offer = Offer(machine, exported[:-1], exported[-1], bytes(self._probe.tolist()))
        except (RuntimeError, ValueError) as error:
            logger.info("other engines of this machine read blocks here through NIXL alone: %s", error)

    def open(self, offer: Offer | None) -> Opened | None:
        """Another worker's memory; None where this one cannot map it, or does not read there what that one wrote."""
        if offer is None or offer.machine != self._machine or self.offer is None:
            return None
        opened = Opened(self._sharing)
        try:
            start, size = opened.map(offer.probed)
            if size < _PROBE_BYTES:
                raise RuntimeError("the memory that was opened is too small")
            self._found.zero_()
            self._sharing.copy(np.array([[start, self._found.data_ptr(), _PROBE_BYTES, 0]], np.int64)).wait()
            if bytes(self._found.tolist()) != offer.probe:
                raise RuntimeError("what is read there is not what was written")
            for region in offer.regions:
                opened.add(region)
        except (RuntimeError, ValueError) as error:
            logger.info("blocks of another engine of this machine are read through NIXL: %s", error)
            opened.close()
            return None
        return opened

    def read(self, opened: Opened, rows: Rows) -> Mark:
        """Begins to read; raises `ValueError` for what is not in memory that the other worker offered."""
        table = np.stack([opened.addresses(rows.theirs, rows.sizes), rows.ours, rows.sizes, np.zeros_like(rows.sizes)])
        return self._sharing.copy(np.ascontiguousarray(table.T, np.int64))


class Opened:
    """Regions of another worker that are mapped here."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._handles: list[bytes] = []
        self._regions: list[tuple[int, int, int]] = []  # the other worker's address, the end, what to add to it here

    def map(self, region: Region) -> tuple[int, int]:
        """(address here, bytes) of a region, until `close`; raises `RuntimeError`."""
        found = self._sharing.open(region.handle)
        self._handles.append(region.handle)
        return found

    def add(self, region: Region) -> None:
        """Maps a region that `addresses` then knows."""
        here, size = self.map(region)
        if size < region.size:
            raise ValueError("the memory that was opened is smaller than what was offered")
        self._regions = sorted([*self._regions, (region.address, region.address + region.size, here - region.address)])

    def addresses(self, theirs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Where pieces at addresses of the other worker lie here; raises `ValueError` for those that lie nowhere."""
        starts, ends, moves = np.array(self._regions or [(0, 0, 0)], np.int64).T
        places = np.maximum(np.searchsorted(starts, theirs, side="right") - 1, 0)
        if ((theirs < starts[places]) | (theirs + sizes > ends[places])).any():
            raise ValueError("blocks lie outside of the memory that was offered")
        return np.asarray(theirs + moves[places])

    def close(self) -> None:
        """Gives the regions back; nothing reads them any more. May be called twice."""
        while self._handles:
            with suppress(RuntimeError):
                self._sharing.release(self._handles.pop())


def _region(sharing: Sharing, tensor: Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.nbytes(), sharing.export(tensor))
