"""Recorded decode steps: which sizes, how a batch is padded to one, and replay.

A recorded step is a decode step of every row (one token each): its inputs lie in the runner's buffers at fixed
addresses, so replaying needs no arguments. Everything else runs eagerly. Knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.model import Model
from frame.core.interfaces.platform import Graphs, StepShape
from frame.core.interfaces.step import StepPlan


class CudaGraphs(Graphs):
    """Graphs by batch size, all in one memory pool; recorded largest first, so that smaller ones reuse its memory."""

    def __init__(self, sizes: list[int], limit: int, device: torch.device) -> None:
        if sizes:
            sizes = sorted({size for size in sizes if size < limit} | {limit})
            sizes = [size for size in sizes if size <= 512]
        self._todo = list(sizes)
        self._device = device
        self._sizes: list[int] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._recording: int | None = None
        self._pool: Any = None

    def prepare(self, model: Model) -> Model:
        return model

    def shape(self, plan: StepPlan) -> StepShape:
        rows, tokens = len(plan.slots), plan.num_tokens
        if tokens == rows and self._sizes and rows <= self._sizes[-1]:
            size = self._sizes[bisect_left(self._sizes, rows)]
            return StepShape(rows, rows, size, size, graph=f"decode-{size}")
        return StepShape(tokens, rows, tokens, rows)

    def run(self, shape: StepShape, forward: Callable[[], Tensor]) -> Tensor:
        size = shape.padded_rows
        if self._recording == size:
            return self._record(size, forward)
        if shape.graph is None:
            return forward()
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden

    def shapes(self) -> list[StepShape]:
        # sizes between two powers of two launch the kernels of one of them
        powers = [size for size in self._todo if size & (size - 1) == 0]
        return [StepShape(size, size, size, size) for size in powers]

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Records the largest size left; False when there was none."""
        if not self._todo:
            return False
        size = self._todo.pop()
        shape = StepShape(size, size, size, size, graph=f"decode-{size}")
        self._recording = size
        try:
            run_dummy(shape)
        finally:
            self._recording = None
        self._sizes = sorted(self._graphs)
        return bool(self._todo)

    def _record(self, size: int, forward: Callable[[], Tensor]) -> Tensor:
        # once eagerly first: kernels compile and libraries allocate outside the recording
        forward()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward()
        self._pool = self._pool or graph.pool()
        self._graphs[size] = (graph, hidden)
        graph.replay()
        return hidden
