"""CUDA graphs of steps: which sizes are captured when, how a batch is padded to a captured size, and replay.

Whole steps are captured where every row decodes one token: the rows lie in the runner's buffers at fixed addresses, so
a replay needs no arguments. Each kind of draw that is common has a graph of its own beside it. Steps with
prompts are captured in pieces (`piecewise`) where that is worth it, everything else runs eagerly. Knows no model and
no device.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from frame.interfaces import Compiler, Forward, Graphs, Model, Part, Result, Shapes, StepShape
from frame.layers import CachedLayer
from frame.weight_offload.null import moves_weights

from ...options import CudaOptions
from ..agreement import CapturePeers, PeerOutOfMemory
from .capture import CapturedGraph
from .piecewise import PiecewiseGraphs, read_bytes, sizes_for
from .shapes import MAX_ROWS, SHORT_LENGTHS, decode_shape, kind_of, name_of, prompt_shape

logger = logging.getLogger("frame.platforms.cuda")

#: The driver gives out memory in pieces of this size, so that a capture which seems to take none may take some.
LEAST_BYTES = 2 << 20
#: Says to other workers, in place of bytes or a size, that this one captures no step with prompts.
_TOO_LARGE = 1 << 62


class StepCapturer(Protocol):
    """What captures launches: `capture.Capturer`."""

    def capture(self, forward: Callable[[], Tensor]) -> CapturedGraph:
        """Captures what `forward` launches."""

    def seconds(self, replay: Callable[[], None]) -> float:
        """What a replay takes on the device."""

    def forget(self) -> None:
        """Drops all graphs."""


class CudaGraphs(Graphs, Compiler):
    """Graphs by batch size and kind of step, all in one memory pool.

    Before the first request the largest size and the small ones are captured, of the engine's own kind (`deterministic`
    or not); the others while nothing else is to do. A batch runs at the next larger size that is captured; the size
    that it would rather have is captured next: between steps once padding has cost as much as a capture does, so that
    both together cost at most twice what either would. Where there is no size it runs eagerly. Few rows that are short
    have graphs of their own (`SHORT_LENGTHS`), unless no row can be longer. Ordinary steps of other shapes run in
    pieces, which are captured when a step needs them, or when all else is, but not between steps that are served: that
    may take too long. `limit` rows and `max_tokens` tokens are the most of a step, `max_model_len` those of a row.
    Workers capture alike, with `peers`, also those of other pipeline stages, which receive as many rows as were padded
    to. `sums`: layers are summed over workers.
    """

    def __init__(
        self,
        capturer: StepCapturer,
        options: CudaOptions,
        limit: int,
        *,
        pieces: PiecewiseGraphs,
        max_tokens: int,
        max_model_len: int = 0,
        deterministic: bool = False,
        shares_prefixes: bool = False,
        serves_adapters: bool = False,
        sums: bool = False,
        peers: CapturePeers | None = None,
    ) -> None:
        sizes = {size for size in options.graph_sizes if size < limit} | {min(limit, MAX_ROWS)}
        self.sizes = sorted(size for size in sizes if size <= MAX_ROWS)
        self.checks_inputs = options.check_captured_inputs
        self._captures_draws = options.capture_draws
        self._capturer = capturer
        self._peers, self._sums = peers or CapturePeers(), sums
        self._has_told = False  # that a worker of the stage has failed at the shape that is being captured
        self._pieces = pieces
        self._max_tokens = max_tokens if options.capture_prompts and not deterministic else 0
        self.deterministic = deterministic
        lengths = {} if deterministic else {size: SHORT_LENGTHS.get(size, 0) for size in self.sizes}
        self._short = {size: length for size, length in lengths.items() if 0 < length < max_model_len}
        self._num_adapted = 1 + serves_adapters
        self._num_kinds = (1 if deterministic else 2 + shares_prefixes) * self._num_adapted
        self._at_start = options.graph_sizes_at_start
        self._budget = options.graph_memory_bytes
        self._captured: dict[StepShape, CapturedGraph] = {}
        self._draws: dict[StepShape, dict[str, CapturedGraph]] = {}  # of a captured step, by kind
        self._capturing: StepShape | None = None
        self._began = False  # steps before the first `capture` are those of a warm-up, for which nothing is captured
        self._served = False  # a step since the last `capture`
        self._urgent: StepShape | None = None  # what a batch wants that has no graph, or whose padding has cost much
        self._most_padding: int | None = None  # rows, added up over steps, that take as long as a capture
        self._capture_seconds = float("inf")  # the least that the host has taken for one
        self.drop()

    def drop(self) -> None:
        every, short = [decode_shape(size, self.deterministic) for size in self.sizes], self.short
        of_size = {one.padded_rows: one for one in (*every, *short)}  # of sizes with two, the short one
        first = [of_size[size] for size in self.sizes if size <= self._at_start]
        first += [] if every[-1] in first else every[-1:]
        self._todo = [one for one in (*short, *every) if one not in first] + first  # the next one last
        self._num_first = len(first)
        self._used = 0
        self._exhausted = False
        self._pieces.drop()
        if self._captured:
            self._captured.clear()
            self._draws.clear()
            self._capturer.forget()
        self._ready: dict[str, list[int]] = {}  # by kind: the sizes that are captured, ascending
        self._padding: dict[str, int] = {}  # by kind: rows beyond the best size, of all steps since the last capture

    @property
    def short(self) -> list[StepShape]:
        """The shapes of graphs for short rows alone."""
        return [decode_shape(size, longest=length) for size, length in self._short.items()]

    def prepare(self, model: Model, shapes: Shapes) -> Model:
        """Implements `Compiler`: from the model's weights follows which steps with prompts are worth a graph."""
        del shapes
        num_layers = max(1, sum(isinstance(module, CachedLayer) for module in model.modules()))
        never = model.whole_prompts or model.segments or moves_weights(model)
        # stages may have unequal numbers of layers, and one alone weights that move
        layer_bytes = self._peers.all.most(_TOO_LARGE if never else read_bytes(model) // num_layers)
        if layer_bytes < _TOO_LARGE:
            self._pieces.sizes = sizes_for(layer_bytes, 1, self._max_tokens, sums=self._sums)
        return model

    def decode(
        self, rows: int, deterministic: bool, shared: bool, adapted: bool = False, longest: int = 0
    ) -> StepShape | None:
        """The shape of the graph that serves a decode step of `rows` rows; remembers the size that would fit best.

        No row has more than `longest` tokens; 0: as many as there may be.
        """
        if rows > self.sizes[-1]:
            return None
        best = self.sizes[bisect_left(self.sizes, rows)]
        if 0 < longest <= self._short.get(best, 0) and not (deterministic or shared):
            short = decode_shape(best, adapted=adapted, longest=self._short[best])
            if short in self._captured:
                return short
            self._want(short)
        kind = kind_of(deterministic, shared, adapted)
        ready = self._ready.get(kind, [])
        place = bisect_left(ready, rows)
        if place == len(ready) or ready[place] != best:
            wanted = decode_shape(best, deterministic, shared, adapted)
            self._want(wanted)
            padding = self._padding.get(kind, 0) + (0 if place == len(ready) else ready[place] - best)
            self._padding[kind] = padding
            if self._began and (place == len(ready) or padding > (self._most_padding or 0)):
                self._urgent = wanted
        return None if place == len(ready) else decode_shape(ready[place], deterministic, shared, adapted)

    def padded(self, tokens: int) -> int:
        """The size in tokens that an ordinary step with prompts runs at in pieces; 0 where it does not."""
        return self._pieces.padded(tokens) if self._began else 0

    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        if part == "forward":
            return cast(Result, self._forward(shape, cast(Forward, work)))
        if part == "draw" and kind:
            return cast(Result, self._draw(shape, kind, cast(Callable[[], Tensor], work)))
        return work()

    def captures(self, shape: StepShape, part: Part) -> bool:
        if part == "forward":
            return shape in self._captured or shape == self._capturing or self._in_pieces(shape)
        return part == "draw" and shape in self._draws

    def _in_pieces(self, shape: StepShape) -> bool:
        prompts = shape.padded_tokens > shape.padded_rows and not (shape.deterministic or shape.shared or shape.adapted)
        return prompts and not shape.tokens_per_rank and self.padded(shape.padded_tokens) == shape.padded_tokens

    def _forward(self, shape: StepShape, forward: Forward) -> Tensor:
        self._served = self._served or self._capturing is None
        if self._in_pieces(shape):
            return self._pieces.run(shape.padded_tokens, forward)
        if self._capturing == shape:
            self._capture(shape, forward)
        captured = self._captured.get(shape)
        if captured is None:
            return forward()
        captured.replay()
        return captured.result

    def _draw(self, shape: StepShape, kind: str, draw: Callable[[], Tensor]) -> Tensor:
        if shape == self._capturing and self._captures_draws:
            self._capture_draw(shape, kind, draw)
        captured = self._draws.get(shape, {}).get(kind)
        if captured is None:
            return draw()
        captured.replay()
        return captured.result

    def reserve(self, run_dummy: Callable[[StepShape], None]) -> int:
        """Captures the largest two and drops them: the second tells what each further one takes at most."""
        if self._budget is None:
            try:
                taken = [self._measure(size, run_dummy) for size in reversed(self.sizes[-2:])]
            except torch.OutOfMemoryError:
                self._budget = 0
                return 0
            finally:
                self.drop()
            further = len(self.sizes) * self._num_kinds + len(self._short) * self._num_adapted - 1
            self._budget = taken[0] + further * max(taken[-1], LEAST_BYTES * (1 + self._captures_draws))
            logger.info(
                "captured steps: %d MiB reserved; the largest took %.1f MiB, the next %.1f MiB",
                self._budget >> 20, taken[0] / 2**20, taken[-1] / 2**20,
            )  # fmt: skip
        return self._budget

    def wanted(self) -> bool:
        return bool(self._todo) or self._lacking() > 0

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Captures the shape asked for last (at the start: the largest, then small ones); False when there was none.

        If a step was served since the last call, it captures only for a batch that has no graph, or when padding has
        cost as much: other requests wait meanwhile, up to 0.1 s for a model of 14B, and steps without requests come.
        """
        served, self._served, self._began = self._served and self._began, False, True
        if self._todo and self._is_spent():
            self._stop(f"{self._used >> 20} MiB of the {(self._budget or 0) >> 20} MiB of graph_memory_bytes are taken")
        shape = self._next(served)
        if shape is None:
            return False
        self._num_first -= 1
        start = time.perf_counter()
        try:
            self._run_capture(shape, run_dummy)
            seconds = time.perf_counter() - start
            self._capture_seconds = min(self._capture_seconds, seconds)
            logger.debug("%s captured in %.0f ms; all take %d MiB", name_of(shape), 1e3 * seconds, self._used >> 20)
        except torch.OutOfMemoryError as error:
            self._stop(str(error) if isinstance(error, PeerOutOfMemory) else "the device has no memory left")
        except Exception as error:
            if self._most_padding is None:
                raise  # at the start somebody looks
            self._stop(f"{name_of(shape)} was not captured: {type(error).__name__}: {error}")
        if self._num_first == 0 and self._most_padding is None:
            self._most_padding = self._peers.all.most(self._weigh())
        return bool(self._todo) and self._num_first > 0

    def _weigh(self) -> int:
        """Rows of padding that take the device as long as a capture takes the host.

        Measured once, before any request: a replay reads the rows of the step that was the last.
        """
        ready = self._ready.get(kind_of(self.deterministic, False), [])
        taken = [(0, 0.0)]
        for size in ready[-2:]:
            graph = self._captured[decode_shape(size, self.deterministic)]
            taken.append((size, self._capturer.seconds(graph.replay)))
        (few, short), (many, long) = taken[-2:] if ready else ((0, 0.0), (1, 0.0))
        each = max((long - short) / (many - few), 1e-9)
        logger.debug("a row of padding takes %.1f us, a capture %.0f ms", 1e6 * each, 1e3 * self._capture_seconds)
        return int(min(self._capture_seconds, 1.0) / each)

    def _next(self, served: bool) -> StepShape | None:
        """The shape to capture now; `served`: whether a step was served since the last call."""
        urgent, self._urgent = self._urgent, None
        if urgent is not None and urgent in self._todo:
            self._todo.remove(urgent)
            self._padding[kind_of(urgent.deterministic, urgent.shared, urgent.adapted)] = 0
            return urgent
        if self._todo and not served:
            return self._todo.pop()
        size = 0 if served else self._lacking_anywhere()
        return prompt_shape(size) if size else None

    def _lacking_anywhere(self) -> int:
        """The most that a stage lacks, as pieces may have failed in one; 0 where one has given up, and so all."""
        size = self._peers.all.most(_TOO_LARGE if self._pieces.has_given_up else self._lacking())
        if size < _TOO_LARGE:
            return size
        self._pieces.stop()
        return 0

    def _lacking(self) -> int:
        """Tokens of a step with prompts that is to be captured, 0 for none.

        What such a step takes is not counted: the budget is for decodes, measured by theirs, and the platform sets
        memory aside for prompts beside it. But a budget that is spent says that memory is short.
        """
        return 0 if self._exhausted or self._is_spent() else self._pieces.lacking()

    def _is_spent(self) -> bool:
        return self._budget is not None and self._used >= self._budget

    def _measure(self, size: int, run_dummy: Callable[[StepShape], None]) -> int:
        before = self._used
        self._run_capture(decode_shape(size, self.deterministic), run_dummy)
        return self._used - before

    def _run_capture(self, shape: StepShape, run_dummy: Callable[[StepShape], None]) -> None:
        """Captures a shape on all workers or on none, and counts what it takes where it takes most."""
        before, failed = self._used, None
        self._capturing, self._has_told = shape, False
        try:
            run_dummy(shape)
        except Exception as error:
            failed = error
        finally:
            self._capturing = None
        if not self._has_told:
            failed = self._peers.stage.failure(failed)
        if not self._peers.one_stage:
            failed = self._peers.all.failure(failed)
        if failed is not None:
            self._forget(shape)
            raise failed
        self._used = before + self._peers.all.most(self._used - before)

    def _forget(self, shape: StepShape) -> None:
        if self._captured.pop(shape, None) is not None and not shape.max_seq_len:
            self._ready[kind_of(shape.deterministic, shape.shared, shape.adapted)].remove(shape.padded_rows)
        self._draws.pop(shape, None)

    def _capture(self, shape: StepShape, forward: Callable[[], Tensor]) -> None:
        captured = self._capture_alike(forward)
        self._captured[shape] = captured
        self._used += captured.num_bytes
        if not shape.max_seq_len:
            kind = kind_of(shape.deterministic, shape.shared, shape.adapted)
            insort(self._ready.setdefault(kind, []), shape.padded_rows)

    def _capture_alike(self, work: Callable[[], Tensor]) -> CapturedGraph:
        """Captures `work` if all workers of the stage can: the others would wait for the sums of a replay."""
        try:
            captured = self._capturer.capture(work)
        except Exception as error:
            self._has_told = True
            raise self._peers.stage.failure(error) or error from None
        if (failed := self._peers.stage.failure()) is not None:
            self._has_told = True
            raise failed
        return captured

    def _capture_draw(self, shape: StepShape, kind: str, draw: Callable[[], Tensor]) -> None:
        """Captures a draw; if the first fails, no draw is captured from then on, and steps run without."""
        try:
            made = self._capture_alike(draw)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            logger.warning("draws are not captured: %s: %s", type(error).__name__, error)
            self._captures_draws = self._has_told = False
            self._draws.clear()
            return
        self._draws.setdefault(shape, {})[kind] = made
        self._used += made.num_bytes

    def _want(self, shape: StepShape) -> None:
        """Has this shape captured next."""
        if not self._began or self._exhausted or (self._todo and self._todo[-1] == shape):
            return
        if shape in self._todo:
            self._todo.remove(shape)
        self._todo.append(shape)

    def _stop(self, reason: str) -> None:
        """Captures nothing from now on."""
        if not self._exhausted:
            sizes = len(self._captured)
            logger.warning("%s: %d captured steps stay, others are padded to them or run eagerly", reason, sizes)
        self._exhausted = True
        self._most_padding = self._most_padding or 0  # what a row takes is measured before requests or not at all
        self._todo.clear()
