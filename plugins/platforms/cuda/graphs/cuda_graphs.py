"""Recorded steps: which sizes are recorded when, how a batch is padded to one, and replay.

A step that is recorded whole is a decode step of every row (one token each): its rows lie in the runner's buffers at
fixed addresses, so replaying needs no arguments. Beside it lies a recording of each of its usual draws. Steps with
prompts are recorded in pieces (`cuda_pieces`) where that is worth it, everything else runs eagerly. Knows no model and
no device.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from frame.interfaces import Forward, Graphs, Model, StepPlan, StepShape

from ...options import CudaOptions
from .capture import Recorded
from .piecewise import Pieces, sizes_for

logger = logging.getLogger("frame.platforms.cuda")

#: Larger batches run eagerly: their launches take less time than their work.
MAX_ROWS = 512
#: The driver gives memory out in pieces of this size, so a recording that shows none may still take some.
LEAST_BYTES = 2 << 20
_PIECES = "pieces"


class StepRecorder(Protocol):
    """What makes recordings: `cuda_recorder.Recorder`."""

    def record(self, forward: Callable[[], Tensor]) -> Recorded:
        """Records what `forward` launches."""

    def forget(self) -> None:
        """All recordings are gone."""


class CudaGraphs(Graphs):
    """Recordings by batch size and kind of step, all in one memory pool.

    Before the first request the largest size and the small ones are recorded, of the engine's own kind (`deterministic`
    or not); the others while nothing else is to do, or between steps. A batch runs at the next larger size that is
    recorded; the size that it would rather have is recorded next. Where there is none it runs eagerly. Ordinary steps
    of other shapes run in pieces, which are recorded when a step needs them, or when all else is, but not between steps
    that are served: that may take too long. `limit` rows and `max_tokens` tokens are the most of a step.
    """

    records_inputs = True

    def __init__(
        self,
        recorder: StepRecorder,
        options: CudaOptions,
        limit: int,
        *,
        pieces: Pieces,
        max_tokens: int,
        deterministic: bool = False,
        shares_prefixes: bool = False,
    ) -> None:
        sizes = {size for size in options.graph_sizes if size < limit} | {min(limit, MAX_ROWS)}
        self._sizes = sorted(size for size in sizes if size <= MAX_ROWS)
        self.checks_inputs = options.check_recorded_inputs
        self._records_draws = options.record_draws
        self._recorder = recorder
        self._pieces = pieces
        self._max_tokens = max_tokens if options.record_prompts and not deterministic else 0
        self._deterministic = deterministic
        self._num_kinds = 1 if deterministic else 2 + shares_prefixes
        self._at_start = options.graph_sizes_at_start
        self._budget = options.graph_memory_bytes
        self._recorded: dict[str, Recorded] = {}
        self._draws: dict[str, dict[str, Recorded]] = {}  # of a recorded step, by kind
        self._recording: str | None = None
        self._served = False  # a step since the last `capture`
        self.drop()

    def drop(self) -> None:
        first = [size for size in self._sizes if size <= self._at_start or size == self._sizes[-1]]
        later = [size for size in self._sizes if size not in first]
        self._todo = [_shape(size, size, self._deterministic) for size in (*later, *first)]  # the next one last
        self._num_first = len(first)
        self._used = 0
        self._exhausted = False
        self._pieces.drop()
        if self._recorded:
            self._recorded.clear()
            self._draws.clear()
            self._recorder.forget()
        self._ready: dict[str, list[int]] = {}  # by kind: the sizes that are recorded, ascending

    def prepare(self, model: Model) -> Model:
        if not (model.whole_prompts or model.segments):
            weights_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            self._pieces.sizes = sizes_for(weights_bytes, self._max_tokens)
        return model

    def shape(self, plan: StepPlan) -> StepShape:
        rows, tokens, deterministic = len(plan.slots), plan.num_tokens, plan.deterministic or self._deterministic
        shared = bool(plan.prefixes)
        if tokens != rows or rows > self._sizes[-1]:
            padded = 0 if deterministic or shared else self._pieces.padded(tokens)
            graph = f"{_PIECES}-{padded}" if padded else None
            return StepShape(tokens, rows, padded or tokens, rows, graph, deterministic=deterministic, shared=shared)
        best = self._sizes[bisect_left(self._sizes, rows)]
        ready = self._ready.get(_kind(deterministic, shared), [])
        place = bisect_left(ready, rows)
        if place == len(ready) or ready[place] != best:
            self._want(_shape(best, best, deterministic, shared))
        if place == len(ready):
            return StepShape(tokens, rows, tokens, rows, deterministic=deterministic, shared=shared)
        return _shape(rows, ready[place], deterministic, shared)

    def run(self, shape: StepShape, forward: Forward) -> Tensor:
        self._served = self._served or self._recording is None
        if shape.graph is None:
            return forward()
        if shape.graph.startswith(_PIECES):
            return self._pieces.run(shape.padded_tokens, forward)
        if self._recording == shape.graph:
            self._record(shape, forward)
        recorded = self._recorded[shape.graph]
        recorded.replay()
        return recorded.result

    def records_draws(self, shape: StepShape) -> bool:
        return shape.graph in self._draws

    def run_draw(self, shape: StepShape, kind: str, draw: Callable[[], Tensor]) -> Tensor:
        if shape.graph is not None and shape.graph == self._recording and self._records_draws:
            self._record_draw(shape.graph, kind, draw)
        recorded = self._draws.get(shape.graph or "", {}).get(kind)
        if recorded is None:
            return draw()
        recorded.replay()
        return recorded.result

    def shapes(self) -> list[StepShape]:
        # sizes between two of these launch the kernels of one of them
        sizes = [size for size in self._sizes if size & (size - 1) == 0 or size == self._sizes[-1]]
        plain = [replace(_shape(size, size, self._deterministic), graph=None) for size in reversed(sizes)]
        return plain if self._deterministic else plain + [replace(shape, deterministic=True) for shape in plain]

    def reserve(self, run_dummy: Callable[[StepShape], None]) -> int:
        """Records the largest two and drops them: the second tells what each further one takes at most."""
        if self._budget is None:
            try:
                taken = [self._measure(size, run_dummy) for size in reversed(self._sizes[-2:])]
            except torch.OutOfMemoryError:
                self._budget = 0
                return 0
            finally:
                self.drop()
            further = len(self._sizes) * self._num_kinds - 1
            self._budget = taken[0] + further * max(taken[-1], LEAST_BYTES * (1 + self._records_draws))
            logger.info(
                "recorded steps: %d MiB reserved; the largest took %.1f MiB, the next %.1f MiB",
                self._budget >> 20, taken[0] / 2**20, taken[-1] / 2**20,
            )  # fmt: skip
        return self._budget

    def wanted(self) -> bool:
        return bool(self._todo) or self._lacking() > 0

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Records the shape asked for last (at the start: the largest, then small ones); False when there was none.

        When only steps with prompts are left it does nothing, just once, if a step was served since the last call.
        """
        served, self._served = self._served, False
        if self._todo and self._is_spent():
            self._stop(f"{self._used >> 20} MiB of the {(self._budget or 0) >> 20} MiB of graph_memory_bytes are taken")
        shape = self._next(served)
        if shape is None:
            return False
        self._num_first -= 1
        start = time.perf_counter()
        try:
            self._run_recording(shape, run_dummy)
            seconds = time.perf_counter() - start
            logger.debug("%s recorded in %.0f ms; all take %d MiB", shape.graph, 1e3 * seconds, self._used >> 20)
        except torch.OutOfMemoryError:
            self._stop("the device has no memory left")
        except Exception as error:
            if self._num_first >= 0:
                raise  # at the start somebody looks
            self._stop(f"{shape.graph} was not recorded: {type(error).__name__}: {error}")
        return bool(self._todo) and self._num_first > 0

    def _next(self, served: bool) -> StepShape | None:
        """What is recorded now, `served` or not since the last time."""
        if self._todo:
            return self._todo.pop()
        size = 0 if served else self._lacking()
        return StepShape(size, 1, size, 1, graph=f"{_PIECES}-{size}") if size else None

    def _lacking(self) -> int:
        """Tokens of a step with prompts that is to be recorded, 0 for none.

        What such a step takes is not counted: the budget is for decodes, measured by theirs, and the platform sets
        memory aside for prompts beside it. But a budget that is spent says that memory is short.
        """
        return 0 if self._exhausted or self._is_spent() else self._pieces.lacking()

    def _is_spent(self) -> bool:
        return self._budget is not None and self._used >= self._budget

    def _measure(self, size: int, run_dummy: Callable[[StepShape], None]) -> int:
        before = self._used
        self._run_recording(_shape(size, size, self._deterministic), run_dummy)
        return self._used - before

    def _run_recording(self, shape: StepShape, run_dummy: Callable[[StepShape], None]) -> None:
        self._recording = shape.graph
        try:
            run_dummy(shape)
        finally:
            self._recording = None

    def _record(self, shape: StepShape, forward: Callable[[], Tensor]) -> None:
        recorded = self._recorder.record(forward)
        self._recorded[str(shape.graph)] = recorded
        self._used += recorded.num_bytes
        insort(self._ready.setdefault(_kind(shape.deterministic, shape.shared), []), shape.padded_rows)

    def _record_draw(self, graph: str, kind: str, draw: Callable[[], Tensor]) -> None:
        """Where a model's logits cannot be recorded, no draw is, and steps are all the same."""
        try:
            made = self._recorder.record(draw)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            logger.warning("draws are not recorded: %s: %s", type(error).__name__, error)
            self._records_draws = False
            self._draws.clear()
            return
        self._draws.setdefault(graph, {})[kind] = made
        self._used += made.num_bytes

    def _want(self, shape: StepShape) -> None:
        """Puts this one first."""
        if self._exhausted or (self._todo and self._todo[-1] == shape):
            return
        if shape in self._todo:
            self._todo.remove(shape)
        self._todo.append(shape)

    def _stop(self, reason: str) -> None:
        """No more is recorded."""
        if not self._exhausted:
            sizes = len(self._recorded)
            logger.warning("%s: %d recorded steps stay, others are padded to them or run eagerly", reason, sizes)
        self._exhausted = True
        self._todo.clear()


def _kind(deterministic: bool, shared: bool) -> str:
    return "deterministic" if deterministic else "shared" if shared else "decode"


@lru_cache(maxsize=4 * MAX_ROWS)
def _shape(rows: int, padded: int, deterministic: bool, shared: bool = False) -> StepShape:
    """A decode step of `rows` rows in the recording of `padded`."""
    graph = f"{_kind(deterministic, shared)}-{padded}"
    return StepShape(rows, rows, padded, padded, graph=graph, deterministic=deterministic, shared=shared)
