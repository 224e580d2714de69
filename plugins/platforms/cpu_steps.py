"""Decode steps of few rows whose calls of kernels in C are written down and made again, without Python between them.

What lies between two products of a step of one row takes longer in Python than in the kernels. So the first step of a
number of rows is watched: if it does nothing but call kernels on memory that stays, the calls are kept. The next such
step computes both ways, and if bits are equal, those after it only make the calls. Knows no model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from frame.interfaces import Graphs, Part, Result, StepShape
from frame.kernels.native.calls import Calls

from .cpu_ops import CpuOps

_logger = logging.getLogger("frame.platforms.cpu")

#: The most rows of a step that is written down: as many as the kernels take in a product with packed weights.
MOST_ROWS = 4
#: Operators of torch that compute nothing: those that only look at memory in another way, and those that ask for some.
_VIEWS = (
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "unbind",
)  # fmt: skip
_EMPTY = ("empty", "empty_like", "new_empty")
#: Operators made of others, which are looked at in their place.
_MADE_OF_OTHERS = {f"aten::{name}" for name in ("chunk", "flatten", "reshape", "unflatten", "view_as")}
_NOTHING = {f"aten::{name}" for name in (*_VIEWS, *_EMPTY)} | {"mkldnn::data_ptr"}

#: The rows of a step, the part of it, and the kind of draw.
_Key = tuple[int, Part, str]


class Watch(TorchDispatchMode):
    """Keeps the tensors that torch's operators give, and the name of the first operator that computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.computed = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes a second, when the first step is written down."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _MADE_OF_OTHERS:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if name not in _NOTHING and not self.computed:
            self.computed = name
        out = func(*args, **(kwargs or {}))
        self.kept.append(out)
        return out


class Recording:
    """The calls of one step, and the memory that they read and write; `result` is what the step gives."""

    def __init__(self, calls: Calls, result: Tensor, kept: list[Any]) -> None:
        self.calls, self.result, self._kept = calls, result, kept
        self.proved = False

    def run(self) -> Tensor:
        """Computes the step of the rows that are in the buffers now."""
        self.calls.run()
        return self.result

    def agrees(self, result: Tensor) -> bool:
        """Whether its calls give the bits of `result`, which the step gave; they serve from then on."""
        mine = self.run()
        self.proved = mine.shape == result.shape and torch.equal(_bits(mine), _bits(result))
        return self.proved


class RecordedSteps(Graphs):
    """Recordings by the number of rows, of ordinary decode steps. All other steps, and parts of steps, run as they are.

    They are forgotten when a weight is packed anew, which moves it, and when memory has moved (`drop`).
    """

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._recordings: dict[_Key, Recording | None] = {}  # None: not to be had
        self._packed = ops.packed_count

    def drop(self) -> None:
        self._recordings.clear()

    def captures(self, shape: StepShape, part: Part) -> bool:
        """A draw is written down once the forward pass before it leaves its result at one place."""
        forward = self._recordings.get((shape.padded_rows, "forward", "")) if _is_decode(shape) else None
        return part == "draw" and forward is not None and forward.proved

    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        if not _is_decode(shape) or self._ops.native is None:
            return work()
        if part == "forward":
            self._forget_what_moved()
        if part == "forward" or (part == "draw" and kind):
            return cast(Result, self._run((shape.padded_rows, part, kind), cast(Callable[[], Tensor], work)))
        return work()

    def _forget_what_moved(self) -> None:
        if self._ops.packed_count != self._packed:
            self._packed = self._ops.packed_count
            self.drop()

    def _run(self, key: _Key, work: Callable[[], Tensor]) -> Tensor:
        if key not in self._recordings:
            return self._record(key, work)
        recording = self._recordings[key]
        if recording is None:
            return work()
        if recording.proved or recording.agrees(result := work()):
            return recording.run()
        _logger.warning("%s of %d rows gave other bits when its calls were made again: it stays as it is", *_named(key))
        self._recordings[key] = None
        return result

    def _record(self, key: _Key, work: Callable[[], Tensor]) -> Tensor:
        native, watch = self._ops.native, Watch()
        if native is None:
            return work()
        with native.noted() as calls, watch:
            result = work()
        if watch.computed:
            _logger.debug("%s of %d rows is not written down, as it calls %s", *_named(key), watch.computed)
        self._recordings[key] = None if watch.computed else Recording(calls, result, watch.kept)
        return result


def _named(key: _Key) -> tuple[str, int]:
    return f"the {key[1]} {key[2]}".rstrip(), key[0]


def _is_decode(shape: StepShape) -> bool:
    special = shape.deterministic or shape.shared or shape.adapted or shape.tokens_per_rank
    return 0 < shape.padded_rows == shape.padded_tokens <= MOST_ROWS and shape.max_query_len == 1 and not special


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
