"""Memory of a device that processes of one machine map of one another: offers of regions, probes, and what was opened.

A driver's word that it maps memory is not enough: a worker offers a probe with its regions, and who maps them reads it
first. Knows no connector, no request and no block.
"""

from __future__ import annotations

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from frame.interfaces import Mark

from .pieces import copy_pieces

#: Bytes of what proves that memory is mapped.
PROBE_BYTES = 256
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
        if len(self.probe) != PROBE_BYTES or self.probed.size < PROBE_BYTES:
            raise ValueError("a worker offers no probe of its memory")


class Sharing(ABC):
    """How processes of one machine reach each other's memory of a device. For any thread."""

    device: torch.device

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the device that `export` takes, uint8 [num_bytes]; raises `RuntimeError` where there is none."""

    @abstractmethod
    def free_bytes(self) -> int:
        """How much memory of the device nobody has."""

    @abstractmethod
    def export(self, region: Tensor) -> bytes:
        """A handle of the memory of a tensor; raises `RuntimeError` where there can be none."""

    @abstractmethod
    def open(self, handle: bytes) -> tuple[int, int]:
        """The address here, and the bytes, of memory that another process exported; raises `RuntimeError`."""

    @abstractmethod
    def release(self, handle: bytes) -> None:
        """Gives back what `open` gave, once for each time; nothing reads or writes it any more."""

    @abstractmethod
    def copy(self, table: np.ndarray, behind: np.ndarray | None = None) -> Mark:
        """Begins to copy: `table` int64 [n, 4] has the address of each piece, that of its copy, its bytes, 0.

        With `behind` int64 [m, 4] the pieces are copied m times, once with each of these rows added to theirs. Copies
        are made in the order of calls.
        """

    @abstractmethod
    def launch(self, table: np.ndarray) -> Callable[[], float]:
        """As `copy`, in the queue in which this thread launches; returns how many seconds it took, once it is done."""

    @abstractmethod
    def move(self, source: int, target: int, num_bytes: int) -> Mark:
        """Begins to copy one piece."""


class CudaSharing(Sharing):
    """By the driver's handles, on a stream of its own that waits for no step: a kernel, and for one piece an engine."""

    def __init__(self, device: torch.device) -> None:
        from frame.kernels import shared_memory

        self.device = device
        self._export, self._move = shared_memory.export, shared_memory.copy
        self._memory = shared_memory.SharedMemory(device)
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)

    def allocate(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)  # of those who had it before nothing is under way any more
        return memory

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def export(self, region: Tensor) -> bytes:
        torch.cuda.synchronize(self.device)  # what the region holds now is there for others
        return self._export(region)

    def open(self, handle: bytes) -> tuple[int, int]:
        with self._lock:
            return self._memory.open(handle)

    def release(self, handle: bytes) -> None:
        with self._lock:
            self._memory.release(handle)

    def copy(self, table: np.ndarray, behind: np.ndarray | None = None) -> Mark:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            copy_pieces(table, self.device, behind=behind)
            return _Passed(self._stream.record_event())

    def launch(self, table: np.ndarray) -> Callable[[], float]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        copy_pieces(table, self.device)
        ended.record()
        return lambda: float(began.elapsed_time(ended)) / 1e3

    def move(self, source: int, target: int, num_bytes: int) -> Mark:
        with torch.cuda.device(self.device):
            self._move(source, target, num_bytes, self._stream)
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


class Offering:
    """A worker's `regions` as others may map them; raises `RuntimeError` or `ValueError` where they cannot."""

    def __init__(self, sharing: Sharing, machine: str, regions: Sequence[Tensor]) -> None:
        content = secrets.token_bytes(PROBE_BYTES)
        self._probe = sharing.allocate(PROBE_BYTES)  # kept, as others read it at any time
        self._probe.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        exported = [_region(sharing, tensor) for tensor in (*regions, self._probe)]
        self.offer = Offer(machine, exported[:-1], exported[-1], content)


class Mapper:
    """Maps the memory that others of this machine offer. For any thread.

    `move` is how blocks will be copied: `Sharing.move`, or the same by another of its means.
    """

    def __init__(self, sharing: Sharing, machine: str, move: Callable[[int, int, int], Mark] | None = None) -> None:
        self._sharing = sharing
        self._machine = machine
        self._move = move or sharing.move
        # in host memory, as copies wait for no step: what a step used, or is to fill, may not be their target
        pinned = sharing.device.type == "cuda"
        self._small = torch.zeros(PROBE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._lock = threading.Lock()

    def open(self, offer: Offer) -> Opened:
        """Another worker's memory.

        Raises `RuntimeError` or `ValueError` where this one cannot map it, or does not read there what that one wrote.
        """
        if offer.machine != self._machine:
            raise ValueError("it is on another machine")
        opened = Opened(self._sharing)
        try:
            start, size = opened.map(offer.probed)
            if size < PROBE_BYTES:
                raise RuntimeError("the memory that was opened is too small")
            if self.read(start) != offer.probe:
                raise RuntimeError("what is read there is not what was written")
            for region in offer.regions:
                opened.add(region)
        except BaseException:
            opened.close()
            raise
        return opened

    def read(self, address: int) -> bytes:
        """The `PROBE_BYTES` bytes at an address of the device, or of memory that is mapped."""
        with self._lock:
            self._small.zero_()
            self._move(address, self._small.data_ptr(), PROBE_BYTES).wait()
            return bytes(self._small.tolist())

    def write(self, address: int, content: bytes) -> None:
        """Puts `PROBE_BYTES` bytes there."""
        with self._lock:
            self._small.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            self._move(self._small.data_ptr(), address, PROBE_BYTES).wait()


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
        """Gives the regions back; nothing reads or writes them any more. May be called twice."""
        while self._handles:
            with suppress(RuntimeError):
                self._sharing.release(self._handles.pop())


def _region(sharing: Sharing, tensor: Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.nbytes(), sharing.export(tensor))
