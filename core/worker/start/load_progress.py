"""What a user sees of weights that load: a bar where there is a terminal, and how much was read in which time."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor
from tqdm import tqdm

from ...interfaces.loader import Fill

logger = logging.getLogger("frame.worker")


class LoadProgress:
    """Stands between the loading of weights and `fill`, which fills tensors; closed by `report`."""

    def __init__(self, fill: Fill, *, shown: bool) -> None:
        self._fill, self._began = fill, time.perf_counter()
        shown = shown and sys.stderr.isatty()
        self._bar = tqdm(total=0, desc="weights", unit="B", unit_scale=True, disable=not shown, leave=False)

    def fill(self, pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        """As `Streams.fill`."""
        some = list(pieces)
        self._bar.total = (self._bar.total or 0) + sum(target.nbytes for target, _ in some)
        self._fill([(target, partial(self._read, read, target.nbytes)) for target, read in some])

    def _read(self, read: Callable[[], Tensor], num_bytes: int) -> Tensor:
        tensor = read()
        self._bar.update(num_bytes)
        return tensor

    def report(self, num_bytes: int, rank: int) -> None:
        """Ends the bar and logs what was read."""
        self._bar.close()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        rate = num_bytes / seconds / 1e9
        logger.info("rank %d: read %.2f GB of weights in %.2f s, %.1f GB/s", rank, num_bytes / 1e9, seconds, rate)
