"""Captures launches on a CUDA device as graphs and replays them; `cuda_graphs` says which."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

#: Graphs whose capture the driver gave up; kept, since torch's allocators go on asking which streams they capture.
_GIVEN_UP: list[torch.cuda.CUDAGraph] = []


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph: `replay` launches it again, into the same `result`; its capture took `num_bytes` of the device."""

    replay: Callable[[], None]
    result: Tensor
    num_bytes: int


class Capturer:
    """Makes graphs that share one pool of memory, so that a smaller graph takes new memory for its output only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # made with the first capture: until then there may be no device

    def capture(self, forward: Callable[[], Tensor]) -> CapturedGraph:
        """Captures `forward`; its results are there after the first replay. Raises `torch.OutOfMemoryError`."""
        # once eagerly first: kernels compile and libraries allocate outside the capture
        forward()
        torch.cuda.synchronize(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        before = self._free()
        graph = torch.cuda.CUDAGraph()
        # not by `torch.cuda.graph`, which gives all cached memory back first, pinned buffers too: steps wait meanwhile
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = forward()
            except BaseException:
                with suppress(RuntimeError):  # the first error is reported
                    self._end(graph)
                raise
            self._end(graph)
        return CapturedGraph(graph.replay, result, max(0, before - self._free()))

    def seconds(self, replay: Callable[[], None]) -> float:
        """What a replay takes on the device: the second of two."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replay()
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def forget(self) -> None:
        """All graphs are gone: the next ones get a pool of their own, and the old one's memory is given back.

        Their memory does not count in torch's peak either: it has a budget of its own beside that of the largest step,
        which is measured by the peak after graphs were tried at the start.
        """
        self._pool = None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            end_capture(graph, self._device, self._pool)
        except RuntimeError:
            self._pool = None  # the next capture gets a pool of its own
            raise


def end_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """Ends a capture. Raises RuntimeError where the driver has given it up, after torch's state is put right.

    Torch's allocators keep what other streams used until that pool is closed, and ask the graph for good.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _GIVEN_UP.append(graph)
        with suppress(RuntimeError, AttributeError):  # it is closed already, or torch has changed
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise
