"""Records launches on a CUDA device and replays them. Knows no step: that is `cuda_graphs`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recorded:
    """What was launched once: `replay` launches it again, into the same `result`. It took `num_bytes` of the device."""

    replay: Callable[[], None]
    result: Tensor
    num_bytes: int


class Recorder:
    """Makes recordings that share one pool of memory, so that of a smaller one only its output is new."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # made with the first recording: until then there may be no device

    def record(self, forward: Callable[[], Tensor]) -> Recorded:
        """Records `forward`; its results are there after the first replay. Raises `torch.OutOfMemoryError`."""
        # once eagerly first: kernels compile and libraries allocate outside the recording
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
                with suppress(RuntimeError):  # the first error is the one to tell
                    graph.capture_end()
                raise
            graph.capture_end()
        return Recorded(graph.replay, result, max(0, before - self._free()))

    def forget(self) -> None:
        """All recordings are gone: the next ones get a pool of their own, and the old one's memory is given back."""
        self._pool = None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])
