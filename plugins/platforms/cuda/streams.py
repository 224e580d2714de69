"""Copies between a CUDA device and the host, all through pinned memory, none waited for. Knows no step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import SMALL_COPY_BYTES, HostCopy, Mark, SideQueue, Streams

from . import weight_copies


class PinnedCopy(HostCopy):
    """Tensors that are being copied to pinned memory; `event` follows the copies."""

    def __init__(self, hosts: dict[str, Tensor], devices: list[Tensor], event: torch.cuda.Event) -> None:
        self._hosts = hosts
        self._devices = devices  # kept until the copy is done, since another stream reads their memory
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> dict[str, np.ndarray]:
        self._event.synchronize()
        self._devices.clear()
        return {name: host.numpy() for name, host in self._hosts.items()}


@cache
def _type_of(kind: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, kind)).dtype


def _pinned(array: np.ndarray) -> Tensor:
    pinned = torch.empty(array.shape, dtype=_type_of(array.dtype), pin_memory=True)
    pinned.numpy()[...] = array  # which may be read-only, as the masks of a grammar are
    return pinned


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pinned tensors that the current stream copies these to."""
    hosts = {}
    for name, tensor in tensors.items():
        hosts[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        hosts[name].copy_(tensor, non_blocking=True)
    return hosts


class EventMark(Mark):
    """Behind what a stream of `device` held when `event` was recorded there."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def before_main(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class SideStream(SideQueue):
    """A stream of its own, on which copies and collectives run beside those of steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Mark:
        return EventMark(self._stream.record_event(), self._device)


class CudaStreams(Streams):
    """Copies on the main stream, large ones to the host on a stream of their own, all through pinned memory.

    Torch's pinned allocator reuses a buffer only after the copies that touch it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)

    def stage(self, array: np.ndarray) -> Tensor:
        return _pinned(array).to(self._device, non_blocking=True)

    def stage_into(self, out: Tensor, array: np.ndarray) -> None:
        out.copy_(_pinned(array), non_blocking=True)

    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        main = torch.cuda.current_stream(self._device)
        if sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_COPY_BYTES:
            # small copies: a second stream would cost the host more than it saves the device
            return PinnedCopy(_copied(tensors), [], main.record_event())
        self._out.wait_stream(main)
        with torch.cuda.stream(self._out):
            hosts = _copied(tensors)
        return PinnedCopy(hosts, list(tensors.values()), self._out.record_event())

    def side_queue(self) -> SideQueue:
        return SideStream(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def fill(self, pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        weight_copies.fill(pieces, [weight_copies.Lane(self._device) for _ in range(weight_copies.THREADS)])
