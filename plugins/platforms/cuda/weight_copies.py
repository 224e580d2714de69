"""Weights from the host to a device: threads that read, and buffers from which the device copies meanwhile.

Reading a mapped file is a copy by one processor, six or seven GB/s from the page cache, and the device copies several
times as quickly from pinned memory: so several threads fill buffers of their own and never wait for the copy that they
have just started. Knows no file and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Bytes of a buffer: large enough that a copy's start costs nothing beside it.
BUFFER_BYTES = 16 << 20
THREADS = 4


class Lane:
    """Two buffers, used in turn by one thread. On CUDA they are pinned, and a stream copies from them."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        if self._stream is not None:
            # the weights' memory may still be written by what the main stream has been asked to do
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffer_bytes = buffer_bytes
        self._buffers: list[tuple[Tensor, Any]] = []
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies `source` into `target` of equal shape, casting; on CUDA it has only started when this returns."""
        if source.is_contiguous() and target.is_contiguous():
            source, target = source.reshape(-1), target.view(-1)
        if not source.numel():
            return
        rows = self._buffer_bytes * len(source) // source.nbytes if source.dim() else 0
        if not rows:  # a single number, or rows larger than a buffer
            target.copy_(source)
            return
        for first in range(0, len(source), rows):
            self._copy_part(target[first : first + rows], source[first : first + rows])

    def finish(self) -> None:
        """Waits for the copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy_part(self, target: Tensor, part: Tensor) -> None:
        buffer, done = self._next_buffer()
        staged = buffer[: part.numel() * part.itemsize].view(part.dtype).view(part.shape)
        if (
            part.is_contiguous()
        ):  # numpy copies on one processor without Python's lock; torch would start threads for each piece
            np.copyto(staged.view(-1).view(torch.uint8).numpy(), part.view(-1).view(torch.uint8).numpy())
        else:
            staged.copy_(part)
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if target.dtype == part.dtype and target.is_contiguous():
                target.copy_(staged, non_blocking=self._pinned)
            else:  # cast and spread on the device
                target.copy_(staged.to(self._device, non_blocking=self._pinned))
            if done is not None:
                done.record(self._stream)

    def _next_buffer(self) -> tuple[Tensor, Any]:
        """(uint8 buffer that nothing reads any more, the event that says so of its next use)."""
        self._turn += 1
        if len(self._buffers) < 2:
            memory = torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._buffers.append((memory, torch.cuda.Event() if self._pinned else None))
            return self._buffers[-1]
        buffer, done = self._buffers[self._turn % 2]
        if done is not None:
            done.synchronize()
        return buffer, done


def fill(pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]], lanes: Sequence[Lane]) -> None:
    """Reads and copies every piece, as many at a time as there are lanes; raises what the first of them raised."""
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def copy(target: Tensor, read: Callable[[], Tensor]) -> None:
        lane = free.get()
        try:
            with torch.no_grad():
                lane.copy(target, read())
        finally:
            free.put(lane)

    with ThreadPoolExecutor(len(lanes), "weights") as threads:
        copies = [threads.submit(copy, target, read) for target, read in pieces]
        try:
            for started in copies:
                started.result()
        finally:
            for started in copies:
                started.cancel()
    for lane in lanes:
        lane.finish()
