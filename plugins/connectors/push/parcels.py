"""Blocks of requests on their way to other engines, and what became of them. Knows no thread's work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from frame.interfaces import Mark

from ..nixl.wire import Channel
from .carrier import Carrier
from .messages import Goal
from .wire import Ready


@dataclass(eq=False)
class Parcel:
    """The blocks of one request on their way. `over`: nothing more is sent, as all is there, or it failed.

    `begun` is the connection on which the other side was told, and `ready` its answer, before which it is not
    `answered`. Where blocks are written from where they lie, `way` does that, and once that is known the lane calls
    `late`, which the step adds to under the `lock`; `written` are those (layer, first place, number) of which the other
    side is not told yet, `told` when it was last told of some.
    """

    owner: str
    goal: Goal
    over: bool = False
    begun: Channel | None = None
    ready: Ready | None = None
    answered: bool = False
    way: Carrier | None = None
    late: list[Callable[[], Batch | None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    written: list[tuple[int, int, int]] = field(default_factory=list)
    told: float = 0.0


@dataclass(frozen=True, eq=False)
class Run:
    """The `blocks` of a layer, of `width` bytes each, which are `start` blocks behind the first that is sent of it.

    `first` is the place of the first in the prompt.
    """

    parcel: Parcel
    layer: int
    start: int
    first: int
    blocks: np.ndarray
    width: int


@dataclass(eq=False)
class Batch:
    """Blocks that are written once `mark` is passed, unless there is an `error`; then `seconds` says how long it took.

    All go to one worker.
    """

    runs: Sequence[Run]
    mark: Mark = field(default_factory=Mark)
    error: Exception | None = None
    seconds: Callable[[], float] = lambda: 0.0


@dataclass
class Outcome:
    """What lanes did: requests whose blocks could not be sent, and bytes that were.

    Of these `direct_bytes` were written to other engines' memory, in so many seconds.
    """

    unsent: list[str] = field(default_factory=list)
    num_bytes: int = 0
    direct_bytes: int = 0
    direct_seconds: float = 0.0


class Notes:
    """What the threads tell the worker's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome = Outcome()

    def fail(self, parcel: Parcel) -> None:
        with self._lock:
            if not parcel.over:
                self._outcome.unsent.append(parcel.owner)
            parcel.over = True

    def sent(self, num_bytes: int, seconds: float, *, direct: bool) -> None:
        with self._lock:
            self._outcome.num_bytes += num_bytes
            if direct:
                self._outcome.direct_bytes += num_bytes
                self._outcome.direct_seconds += seconds

    def take(self) -> Outcome:
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
            return outcome
