"""Steps with prompts, recorded in pieces: all of a model but its attention, which runs as it is between two of them.

What attention launches follows the rows of a step; the rest of a model knows only the number of tokens. A piece is what
lies between the attention of one layer and that of the next. Its results lie where they lay when it was recorded, and
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
from torch import Tensor

from frame.interfaces import Forward, ForwardStep

logger = logging.getLogger("frame.platforms.cuda")

#: Sizes in tokens; a step is padded to the next.
SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
#: Tokens times bytes of weights beyond which the device is busy for longer than the host takes to launch kernels one by
#: one: 20 ms at 600 TFLOP/s for weights of two bytes.
WORTHWHILE = 12e12

#: Sizes whose first recording may fail: each failure costs the later ones a pool of memory of their own.
_MOST_REFUSED = 3

#: Attention of a layer: `call(query, key, value, step)`.
Attend = Callable[..., Tensor]
Replay = Callable[[], None]


def sizes_for(weights_bytes: int, max_tokens: int) -> list[int]:
    """The sizes worth recording of a model with so many bytes of weights, ascending; `max_tokens` is a step's most.

    A step of one token is a decode.
    """
    most = min(max_tokens, WORTHWHILE / max(1, weights_bytes))
    return sorted(size for size in {*SIZES, max_tokens} if 1 < size <= most)


class Recorder(Protocol):
    """What captures pieces: `piecewise_capture.PieceRecorder`."""

    def recording(self) -> AbstractContextManager[None]:
        """Around a forward pass while it is recorded; also ends a piece that an error has left open."""

    def begin(self) -> None:
        """Begins a piece: launches are captured and do not run."""

    def end(self) -> Replay:
        """Ends the piece and returns what replays it."""

    def see(self, tensor: Tensor) -> Tensor:
        """The tensor's memory, which a later piece may use again."""

    def forget(self) -> None:
        """Recordings are gone, or one has failed: the next ones share no memory with those before."""


@dataclass(frozen=True)
class Piece:
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
class Recording:
    """The pieces of a forward pass of one size."""

    pieces: list[Piece]
    last: Replay
    hidden: Tensor


class Pieces:
    """Recordings by padded number of tokens.

    The first step of a size is recorded: it runs piece by piece meanwhile. Where that fails it runs as it is, by which
    libraries have chosen what they launch for that size, and the next step of it is recorded. Where that fails too, the
    first step of a fourth size fails, or the device has no memory left, nothing is recorded any more. Nor are steps
    larger than all of `sizes`, which ascend.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.sizes: list[int] = []
        self._recorder = recorder
        self._failed: set[int] = set()  # once
        self._recordings: dict[int, Recording] = {}
        self._places: dict[tuple[int, ...], Tensor] = {}

    def padded(self, tokens: int) -> int:
        """The size that a step of so many tokens is padded to; 0 where it is not to be recorded."""
        place = bisect_left(self.sizes, tokens)
        return self.sizes[place] if place < len(self.sizes) else 0

    def lacking(self) -> int:
        """The largest size that is not recorded yet, 0 where all are.

        All share one pool, which the largest fills: smaller ones find their places in it, while those of a growing size
        would each time be too small for the next.
        """
        if len(self._recordings) == len(self.sizes):
            return 0
        return next((size for size in reversed(self.sizes) if size not in self._recordings), 0)

    def drop(self) -> None:
        """Forgets all recordings: what they read has moved."""
        self._failed.clear()
        self._recordings.clear()
        self._places.clear()
        self._recorder.forget()

    def run(self, size: int, forward: Forward) -> Tensor:
        """The hidden states of a step of that size, valid until the next run."""
        recording = self._recordings.get(size)
        if recording is None:
            return self._record(size, forward) if size in self.sizes else forward()
        step = forward.step()
        for piece in recording.pieces:
            piece.run(step)
        recording.last()
        return recording.hidden

    def _record(self, size: int, forward: Forward) -> Tensor:
        """Runs a step and records it: each piece is replayed as soon as it ends, so that the results are real."""
        pieces: list[Piece] = []
        recorder = self._recorder

        def attend(call: Attend, *arguments: Any) -> Tensor:
            replay = recorder.end()
            replay()
            out = call(*arguments)
            place = self._place_for(out)
            place.copy_(out)
            inputs = tuple(recorder.see(tensor) for tensor in arguments[:-1])
            pieces.append(Piece(replay, call, inputs, place))
            recorder.begin()
            return place

        step = replace(forward.step(), attend=attend)
        try:
            with recorder.recording():
                recorder.begin()
                hidden = forward(step)
                last = recorder.end()
                last()
        except Exception as error:
            pieces.clear()
            self._fail(size, error)
        else:
            self._recordings[size] = Recording(pieces, last, hidden)
            return hidden
        return forward()  # when the error, and what its frames hold, are gone

    def _fail(self, size: int, error: Exception) -> None:
        may_fail = size not in self._failed and len(self._failed) < _MOST_REFUSED
        if may_fail and not isinstance(error, torch.OutOfMemoryError):
            self._failed.add(size)
            self._recorder.forget()
            logger.debug("%d tokens are recorded later: %s: %s", size, type(error).__name__, error)
            return
        self.sizes = []
        self.drop()
        logger.warning("steps with prompts are no longer recorded: %s: %s", type(error).__name__, error)

    def _place_for(self, out: Tensor) -> Tensor:
        """Where the next piece reads attention's result: one place for all layers and sizes of a shape."""
        key = *out.shape[1:], out.dtype.itemsize
        place = self._places.get(key)
        if place is None or len(place) < len(out):
            place = self._places[key] = out.new_empty((max([*self.sizes, len(out)]), *out.shape[1:]))
        return place[: len(out)]
