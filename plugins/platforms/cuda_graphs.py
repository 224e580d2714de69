"""Recorded decode steps: which sizes, how a batch is padded to one, and replay.

A recorded step is a decode step of every row (one token each): its inputs lie in the runner's buffers at fixed
addresses, so replaying needs no arguments. Everything else runs eagerly. Knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from frame.core.interfaces.model import Model
from frame.core.interfaces.platform import Forward, Graphs, StepShape
from frame.core.interfaces.step import StepPlan


class CudaGraphs(Graphs):
    """Graphs by batch size and numerics, all in one memory pool.

    At the start those of the engine's own mode (`deterministic` or not) are recorded, largest first, so that smaller
    ones reuse its memory. Steps of the other mode, and those whose rows share prefixes, run eagerly where they are
    first met, and from then on as recorded.
    """

    def __init__(self, sizes: list[int], limit: int, device: torch.device, deterministic: bool = False) -> None:
        sizes = sorted({size for size in sizes if size < limit} | {limit})
        sizes = [size for size in sizes if size <= 512]
        self._deterministic = deterministic
        self._todo = [_shape(size, size, deterministic) for size in sizes]
        self._device = device
        self._sizes: list[int] = []
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._recording: str | None = None
        self._pool: Any = None

    def prepare(self, model: Model) -> Model:
        return model

    def shape(self, plan: StepPlan) -> StepShape:
        rows, tokens, deterministic = len(plan.slots), plan.num_tokens, plan.deterministic or self._deterministic
        shared = bool(plan.prefixes)
        eager = StepShape(tokens, rows, tokens, rows, deterministic=deterministic, shared=shared)
        if tokens != rows or not self._sizes or rows > self._sizes[-1]:
            return eager
        shape = _shape(rows, self._sizes[bisect_left(self._sizes, rows)], deterministic, shared)
        if shape.graph not in self._graphs:
            self._todo.append(_shape(shape.padded_rows, shape.padded_rows, deterministic, shared))
            return eager
        return shape

    def run(self, shape: StepShape, forward: Forward) -> Tensor:
        if shape.graph is None:
            return forward()
        if self._recording == shape.graph:
            return self._record(shape.graph, forward)
        graph, hidden = self._graphs[shape.graph]
        graph.replay()
        return hidden

    def shapes(self) -> list[StepShape]:
        # sizes between two powers of two launch the kernels of one of them
        powers = [shape for shape in self._todo if shape.padded_rows & (shape.padded_rows - 1) == 0]
        plain = [replace(shape, graph=None) for shape in powers]
        return plain if self._deterministic else plain + [replace(shape, deterministic=True) for shape in plain]

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Records the shape asked for last (at the start: the largest left); False when there was none."""
        if not self._todo:
            return False
        shape = self._todo.pop()
        self._recording = shape.graph
        try:
            run_dummy(shape)
        finally:
            self._recording = None
        if shape.deterministic == self._deterministic:
            self._sizes = sorted({*self._sizes, shape.padded_rows})
        return bool(self._todo)

    def _record(self, name: str, forward: Callable[[], Tensor]) -> Tensor:
        # once eagerly first: kernels compile and libraries allocate outside the recording
        forward()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward()
        self._pool = self._pool or graph.pool()
        self._graphs[name] = (graph, hidden)
        graph.replay()
        return hidden


def _shape(rows: int, padded: int, deterministic: bool, shared: bool = False) -> StepShape:
    """A decode step of `rows` rows in the graph of `padded`."""
    kind = "deterministic" if deterministic else "shared" if shared else "decode"
    return StepShape(rows, rows, padded, padded, graph=f"{kind}-{padded}", deterministic=deterministic, shared=shared)
