"""Steps with prompts, captured in pieces: all of a model but its attention, which runs as it is between two of them.

What attention launches follows the rows of a step; the rest of a model knows only the number of tokens. A piece is what
lies between the attention of one layer and that of the next. Its results lie where they lay when it was captured, and
attention's are copied to where the next piece reads them. To launch a piece takes the host less than to launch one of
its kernels, and for few tokens, or a small model, launching is all that a step takes. Knows no device.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from frame.interfaces import Forward, ForwardStep
from frame.layers import Experts, Router

from ..agreement import CapturePeers

logger = logging.getLogger("frame.platforms.cuda")

#: Sizes in tokens; a step is padded to the next.
SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
#: Tokens times bytes of weights, for each layer, beyond which the device is busy for longer than the host takes to
#: launch kernels one by one: 0.6 ms of a layer at 600 TFLOP/s for weights of two bytes; with sums over ranks the host
#: takes twice as long.
WORTHWHILE, WORTHWHILE_WITH_SUMS = 3.6e11, 7.2e11

#: Sizes whose first capture may fail: each failure costs the later ones a pool of memory of their own.
_MOST_REFUSED = 3

#: Attention of a layer: `call(query, key, value, step)`.
Attend = Callable[..., Tensor]
Replay = Callable[[], None]


def read_bytes(model: nn.Module) -> int:
    """Bytes of weights that a token is multiplied with: of routed experts those that it chooses."""
    routers = [module.spec for module in model.modules() if isinstance(module, Router)]
    share = max((spec.top_k / spec.num_experts for spec in routers), default=1.0)
    total = 0.0
    for module in model.modules():
        own = sum(weight.numel() * weight.element_size() for weight in module.parameters(recurse=False))
        total += own * share if isinstance(module, Experts) else own
    return int(total)


def sizes_for(weights_bytes: int, num_layers: int, max_tokens: int, *, sums: bool = False) -> list[int]:
    """The sizes worth a graph for a model whose tokens read so many bytes of weights, ascending.

    `max_tokens` is a step's most; `sums` says whether layers are summed over ranks. A step of one token is a decode.
    """
    worthwhile = num_layers * (WORTHWHILE_WITH_SUMS if sums else WORTHWHILE)
    most = min(max_tokens, worthwhile / max(1, weights_bytes))
    return sorted(size for size in {*SIZES, max_tokens} if 1 < size <= most)


class PiecewiseCapturer(Protocol):
    """What captures pieces: `piecewise_capture.PieceCapturer`."""

    def capture(self) -> AbstractContextManager[None]:
        """Around a forward pass while it is captured; also ends a piece that an error has left open."""

    def begin(self) -> None:
        """Begins a piece: launches are captured and do not run."""

    def end(self) -> Replay:
        """Ends the piece and returns what replays it."""

    def see(self, tensor: Tensor) -> Tensor:
        """The tensor's memory, which a later piece may use again."""

    def forget(self) -> None:
        """Graphs are gone, or one has failed: the next ones share no memory with those before."""


@dataclass(frozen=True)
class GraphPiece:
    """What a model does up to the attention of a layer; that attention, what it reads, and where its result goes."""

    replay: Replay
    attend: Attend
    inputs: tuple[Tensor, ...]
    out: Tensor

    def run(self, step: ForwardStep) -> None:
        """Replays each piece and attends after it."""
        self.replay()
        self.out.copy_(self.attend(*self.inputs, step))


@dataclass(frozen=True)
class PiecewiseGraph:
    """The pieces of a forward pass of one size."""

    pieces: list[GraphPiece]
    last: Replay
    hidden: Tensor


class PiecewiseGraphs:
    """Graphs by padded number of tokens.

    The first step of a size is captured, and runs piece by piece meanwhile. If its capture fails, it runs eagerly, by
    which libraries choose their kernels for that size, and the next step of the size is captured. If that fails too, or
    the first step of a fourth size, or if the device has no memory left, nothing is captured any more. Steps larger
    than the last of `sizes`, which ascend, are not captured.

    What fails on one worker of a stage fails on all, before a piece is replayed whose sums the others would wait for.
    Other stages go on: they hear by `has_given_up` that this one captures nothing more, and steps are padded to `sizes`
    until all `stop` at once.
    """

    def __init__(self, capturer: PiecewiseCapturer, peers: CapturePeers | None = None) -> None:
        self.sizes: list[int] = []
        self.has_given_up = False
        self._capturer = capturer
        self._peers = peers or CapturePeers()
        self._failed: set[int] = set()  # once
        self._graphs: dict[int, PiecewiseGraph] = {}
        self._places: dict[tuple[int, ...], Tensor] = {}

    def padded(self, tokens: int) -> int:
        """The size that a step of so many tokens is padded to; 0 where it is not to be captured."""
        place = bisect_left(self.sizes, tokens)
        return self.sizes[place] if place < len(self.sizes) else 0

    def lacking(self) -> int:
        """The largest size that is not captured yet, 0 where all are.

        All share one pool, which the largest fills: smaller ones find their places in it, while those of a growing size
        would each time be too small for the next.
        """
        if len(self._graphs) == len(self.sizes):
            return 0
        return next((size for size in reversed(self.sizes) if size not in self._graphs), 0)

    def drop(self) -> None:
        """Forgets all graphs, because what they read has moved."""
        self._failed.clear()
        self._forget()

    def stop(self) -> None:
        """Captures nothing any more and pads no step."""
        self.sizes = []
        self.drop()

    def _forget(self) -> None:
        self._graphs.clear()
        self._places.clear()
        self._capturer.forget()

    def run(self, size: int, forward: Forward) -> Tensor:
        """The hidden states of a step of that size, valid until the next run."""
        graph = self._graphs.get(size)
        if graph is None:
            return forward() if self.has_given_up or size not in self.sizes else self._capture(size, forward)
        step = forward.step()
        for piece in graph.pieces:
            piece.run(step)
        graph.last()
        return graph.hidden

    def _capture(self, size: int, forward: Forward) -> Tensor:
        """Runs a step and captures it: each piece is replayed as soon as it ends, so that the results are real."""
        pieces: list[GraphPiece] = []
        capturer, stage, shared = self._capturer, self._peers.stage, list[Exception]()

        def end() -> Replay:
            replay = capturer.end()
            shared.extend(filter(None, [stage.failure()]))
            if shared:
                raise shared[0]
            replay()
            return replay

        def attend(call: Attend, *arguments: Any) -> Tensor:
            replay = end()
            out = call(*arguments)
            place = self._place_for(out)
            place.copy_(out)
            inputs = tuple(capturer.see(tensor) for tensor in arguments[:-1])
            pieces.append(GraphPiece(replay, call, inputs, place))
            capturer.begin()
            return place

        step = replace(forward.step(), attend=attend)
        try:
            with capturer.capture():
                capturer.begin()
                hidden = forward(step)
                last = end()
        except Exception as error:
            pieces.clear()
            self._fail(size, shared.pop() if shared else stage.failure(error) or error)
        else:
            self._graphs[size] = PiecewiseGraph(pieces, last, hidden)
            return hidden
        return forward()  # when the error, and what its frames hold, are gone

    def _fail(self, size: int, error: Exception) -> None:
        may_fail = size not in self._failed and len(self._failed) < _MOST_REFUSED
        if may_fail and not isinstance(error, torch.OutOfMemoryError):
            self._failed.add(size)
            self._capturer.forget()
            logger.debug("%d tokens are captured later: %s: %s", size, type(error).__name__, error)
            return
        self.has_given_up = True
        if self._peers.one_stage:
            self.stop()
        else:
            self._forget()
        logger.warning("steps with prompts are no longer captured: %s: %s", type(error).__name__, error)

    def _place_for(self, out: Tensor) -> Tensor:
        """Where the next piece reads attention's result: one place for all layers and sizes of a shape."""
        key = *out.shape[1:], out.dtype.itemsize
        place = self._places.get(key)
        if place is None or len(place) < len(out):
            place = self._places[key] = out.new_empty((max([*self.sizes, len(out)]), *out.shape[1:]))
        return place[: len(out)]
