"""Captures the pieces of a forward pass on a CUDA device. Knows no step: that is `piecewise`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .capture import end_capture

#: Arrays of other types than those that the interface knows are seen as integers of their size.
_TYPES = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class PieceCapturer:
    """Makes graphs of what lies between `begin` and `end`, in one pool of memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # made with the first capture: until then there may be no device
        self._graph: torch.cuda.CUDAGraph | None = None

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """What is launched inside follows what was launched before, and comes before what is launched afterwards."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                try:
                    yield
                finally:
                    self._abandon()  # on the stream where it began: elsewhere it would go on
        finally:
            main.wait_stream(self._stream)

    def begin(self) -> None:
        """Begins a capture: launches do not run from here on."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        # nothing has run at this size yet: kernels may be loaded meanwhile, which stricter modes refuse
        self._graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")

    def end(self) -> Callable[[], None]:
        """Ends the capture; returns a function that replays what was launched since `begin`."""
        graph, self._graph = self._graph, None
        if graph is None:
            raise RuntimeError("no piece was begun")
        end_capture(graph, self._device, self._pool)
        return graph.replay

    def forget(self) -> None:
        """The next graphs get a pool of their own: one that has lost all of its own cannot be used again."""
        self._pool = None

    def see(self, tensor: Tensor) -> Tensor:
        """The same memory, not kept: what is captured later uses it again, when its time is over."""
        if not tensor.numel():
            return tensor
        seen: Tensor = torch.as_tensor(_Memory(tensor), device=tensor.device)
        return seen.view(tensor.dtype)

    def _abandon(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):
                end_capture(graph, self._device, self._pool)


class _Memory:
    """Device memory that somebody else owns, by the CUDA array interface."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _TYPES[size],
            "version": 3,
        }
